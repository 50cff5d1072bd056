"""A byte-level tokenizer small enough to know by heart."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from sera_jax.policy.tokenizer import END_OF_TEXT, IM_END, IM_START, Tokenizer

THINK, END_THINK = "<think>", "</think>"


def spelled(data: bytes) -> str:
    """Bytes as a byte-level vocabulary spells them: printable ones as they are, others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in data)


def byte_tokenizer(*merges: tuple[bytes, bytes]) -> Tokenizer:
    """Id b is byte b; each merge is the next id from 256 on; then three chat tokens and two think marks.

    The think marks are added but not special, as they are in Qwen3's tokenizer.
    """
    vocabulary = {spelled(bytes([byte])): byte for byte in range(256)}
    pairs = [(spelled(a), spelled(b)) for a, b in merges]
    vocabulary |= {a + b: 256 + n for n, (a, b) in enumerate(pairs)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT, IM_START, IM_END])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (THINK, END_THINK)])
    return Tokenizer(backend)
