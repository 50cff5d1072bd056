"""Makes qwen3_tied/ and qwen3_untied/: tiny Qwen3 models and what ``transformers`` computes with them.

Run it in an environment of its own, because the project does not depend on torch:

    python3.11 -m venv /tmp/golden && /tmp/golden/bin/pip install \
        torch==2.13.0 transformers==5.24.0 safetensors numpy
    /tmp/golden/bin/python tests/golden/make_qwen3.py

Each directory is a Hugging Face checkpoint as ``save_pretrained`` writes it (float32), plus
``reference.npz``: a batch of sequences of unequal lengths, padded on the right, and for each its hidden
states (after the final norm), logits and the log-prob of each next token. Values at padding are 0.

The sizes are awkward on purpose: head_dim is not hidden_size / num_attention_heads, query heads share
key/value heads, no two axes have one length. Weights are drawn large, and gains away from 1, so that a
missing norm, a wrong pairing of heads or a transposed matrix shows in the first digit.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

LENGTHS = (13, 7, 1)
SHAPES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
MODELS = {
    "qwen3_tied": {"vocab_size": 53, "tie_word_embeddings": True, "rope_theta": 10000.0},
    "qwen3_untied": {"vocab_size": 47, "tie_word_embeddings": False, "rope_theta": 1000000.0},
}


def make(name: str, changes: dict, seed: int, out: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = transformers.Qwen3Config(**SHAPES, **changes)
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            centre = 1.0 if key.endswith("norm.weight") else 0.0
            value.copy_(centre + 0.25 * torch.randn(value.shape, generator=generator))
    ids = torch.randint(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids = torch.where(mask, ids, 0)
    with torch.no_grad():
        hidden = model.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        logits = model(input_ids=ids, attention_mask=mask.long()).logits
    # Of token t given those before it; the first token of a sequence has none.
    logprobs = torch.zeros(ids.shape)
    logprobs[:, 1:] = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    zero = lambda x: torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), x, 0.0).numpy()
    model.save_pretrained(out / name)
    np.savez_compressed(
        out / name / "reference.npz",
        ids=ids.numpy().astype(np.int32),
        lengths=np.asarray(LENGTHS, np.int32),
        hidden=zero(hidden),
        logits=zero(logits),
        logprobs=zero(logprobs),
    )


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for seed, (name, changes) in enumerate(MODELS.items()):
        make(name, changes, seed, out)
