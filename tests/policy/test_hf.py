"""Hugging Face directories: round trips, sharded reading, and everything that is refused."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from sera_jax.policy import hf, qwen3, sharding
from sera_jax.policy.tokenizer import word_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TIED, UNTIED = GOLDEN / "qwen3_tied", GOLDEN / "qwen3_untied"
# hidden / heads would be 4: q is [24, 12] in the file, o [12, 24], k and v [8, 12], head norms [8].
SMALL = qwen3.tiny(
    32, hidden_size=12, intermediate_size=16, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8
)


def random_params(cfg, seed=0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), qwen3.abstract(cfg))


def parse(path):
    """Tensors of a file, read by hand: 8 bytes of header length, a JSON header, then the bytes."""
    raw = Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
    return {
        name: np.frombuffer(raw[8 + size :][slice(*t["data_offsets"])], dtypes[t["dtype"]]).reshape(
            t["shape"]
        )
        for name, t in header.items()
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def saved(directory, cfg=SMALL, **settings):
    params = random_params(cfg)
    hf.save(directory, params, cfg, **settings)
    return params


def edit_config(directory, **changes):
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v != "absent"}))


def edit_weights(directory, change):
    """Rewrites ``model.safetensors`` after ``change`` has worked on its tensors."""
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


@pytest.fixture
def tied(tmp_path):
    """A writable copy of the tied golden model and its configuration."""
    directory = tmp_path / "tied"
    shutil.copytree(TIED, directory)
    return directory, hf.config_from_hf(directory)


# --- reading and writing -------------------------------------------------------------------------


@pytest.mark.parametrize("source", [TIED, UNTIED], ids=["tied", "untied"])
def test_what_transformers_wrote_comes_back_bit_for_bit(source, tmp_path):
    cfg = hf.config_from_hf(source)
    hf.save(tmp_path / "copy", hf.load(source, cfg), cfg)
    before, after = parse(source / "model.safetensors"), parse(tmp_path / "copy/model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert hf.config_from_hf(tmp_path / "copy") == cfg


def test_each_parameter_is_the_transposed_tensor_of_its_layer():
    cfg = hf.config_from_hf(UNTIED)
    params, tensors = hf.load(UNTIED, cfg), parse(UNTIED / "model.safetensors")
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert q.shape == (60, 24)
    np.testing.assert_array_equal(params["layers"]["q"][1], q.T)
    np.testing.assert_array_equal(
        params["layers"]["k_norm"][0], tensors["model.layers.0.self_attn.k_norm.weight"]
    )
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"])


def test_shards_hold_what_one_file_holds(tmp_path):
    params = saved(tmp_path / "one")
    # The embedding, 32 * 12 * 4 = 1536 bytes, is the largest tensor.
    hf.save(tmp_path / "many", params, SMALL, max_shard_bytes=2000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 3
    assert index["metadata"]["total_size"] == 4 * qwen3.parameter_count(SMALL)
    whole, parts = parse(tmp_path / "one/model.safetensors"), {}
    for name in files:
        part = parse(tmp_path / "many" / name)
        assert sum(value.nbytes for value in part.values()) <= 2000
        assert all(index["weight_map"][tensor] == name for tensor in part)
        parts |= part
    assert parts.keys() == whole.keys()
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    assert_same(hf.load(tmp_path / "many", SMALL), params)


def test_bfloat16_rounds_once_and_then_stays(tmp_path):
    params = saved(tmp_path / "half", dtype=jnp.bfloat16)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert_same(hf.load(tmp_path / "half", SMALL, dtype=jnp.bfloat16), expected)
    # Read as float32, the parameters of training, the values are the rounded ones.
    as_float = jax.tree.map(lambda x: x.astype(jnp.float32), expected)
    assert_same(hf.load(tmp_path / "half", SMALL), as_float)
    hf.save(tmp_path / "again", as_float, SMALL, dtype=jnp.bfloat16)
    before, after = parse(tmp_path / "half/model.safetensors"), parse(tmp_path / "again/model.safetensors")
    assert all(np.array_equal(before[name].view(np.uint16), after[name].view(np.uint16)) for name in before)
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_transposed_views_are_written_by_value(tmp_path):
    """A writer that takes a Fortran-ordered buffer as it lies keeps the shape and scrambles values."""
    params = jax.tree.map(np.asarray, random_params(SMALL))
    views = jax.tree.map(lambda x: np.asfortranarray(x), params)
    assert not views["embed"].flags.c_contiguous
    hf.save(tmp_path / "views", views, SMALL)
    tensors = parse(tmp_path / "views/model.safetensors")
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embed"])
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.up_proj.weight"], params["layers"]["up"][1].T)


def test_shards_of_a_mesh_are_read_in_parts_and_gathered_when_written(tmp_path):
    cfg = qwen3.tiny(
        32, hidden_size=12, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    params = saved(tmp_path / "one", cfg)
    shardings = sharding.param_shardings(cfg, sharding.make_mesh((2, 2, 2)))
    read = hf.load(tmp_path / "one", cfg, shardings)
    assert_same(read, params)
    q = read["layers"]["q"]
    assert q.sharding.is_equivalent_to(shardings["layers"]["q"], q.ndim)
    # [2, 12, 32]: the hidden axis over fsdp, the heads over tensor.
    assert q.addressable_shards[0].data.shape == (2, 6, 16)
    hf.save(tmp_path / "two", read, cfg)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_the_weights_may_be_donated(tmp_path):
    params = saved(tmp_path / "m")
    read = hf.load(tmp_path / "m", SMALL)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(read)
    assert_same(doubled, jax.tree.map(lambda x: 2 * x, params))
    assert_same(hf.load(tmp_path / "m", SMALL), params)


def test_tokenizer_and_end_tokens_travel_along(tmp_path):
    tokenizer = word_tokenizer(["get", "craft"], max_number=9)
    tokenizer.save(tmp_path / "tokenizer")
    saved(tmp_path / "m", tokenizer_dir=tmp_path / "tokenizer", max_position_embeddings=99)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
    # <unk>, 0 to 9, ten pieces, two words, then <|endoftext|> 23, <|im_start|> 24, <|im_end|> 25.
    generation = json.loads((tmp_path / "m/generation_config.json").read_text())
    assert generation == {"eos_token_id": [25, 23], "pad_token_id": 23}
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (25, 23)
    assert config["max_position_embeddings"] == 99


# --- shards and tensors that do not fit ------------------------------------------------------------


def test_every_missing_shard_is_named(tmp_path):
    saved(tmp_path, max_shard_bytes=8000)  # of 12656
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.unlink()
    with pytest.raises(hf.HuggingFaceError, match=r"do not exist: model-00002-of-00002\.safetensors$"):
        hf.load(tmp_path, SMALL)
    first.unlink()
    both = r"do not exist: model-00001-of-00002\.safetensors, model-00002-of-00002\.safetensors$"
    with pytest.raises(hf.HuggingFaceError, match=both):
        hf.load(tmp_path, SMALL)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None], ids=["empty", "pointer", "cut"]
)
def test_a_damaged_file_is_named(content, tmp_path):
    saved(tmp_path, max_shard_bytes=8000)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(hf.HuggingFaceError, match=r"00002-of-00002\.safetensors is not a whole"):
        hf.load(tmp_path, SMALL)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_that_names_nothing(content, tmp_path):
    saved(tmp_path, max_shard_bytes=8000)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(hf.HuggingFaceError, match=r"index\.json: weight_map is missing or empty"):
        hf.load(tmp_path, SMALL)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(
        hf.HuggingFaceError, match=r"neither model\.safetensors nor model\.safetensors\.index"
    ):
        hf.load(tmp_path, SMALL)


def test_every_missing_extra_and_misshapen_tensor_is_named(tied):
    directory, cfg = tied

    def damage(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(60, np.float32)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:50]
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((40, 24), np.int8)

    edit_weights(directory, damage)
    with pytest.raises(hf.HuggingFaceError) as error:
        hf.load(directory, cfg)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("tied: 5 tensors do not fit the configuration:")
    assert sorted(line.strip() for line in lines[1:]) == [
        "missing model.layers.1.mlp.up_proj.weight [40, 24]",
        "missing model.norm.weight [24]",
        "model.embed_tokens.weight has shape [50, 24], expected [53, 24]",
        "model.layers.0.mlp.up_proj.weight has dtype I8, expected F32, BF16, F16",
        "not expected: model.layers.0.self_attn.q_proj.bias [60]",
    ]


def test_a_tensor_in_two_files_is_refused(tmp_path):
    saved(tmp_path, max_shard_bytes=8000)  # of 12656
    _, second = sorted(tmp_path.glob("*.safetensors"))
    both = safetensors.numpy.load_file(second)
    both["model.embed_tokens.weight"] = np.zeros((2, 2), np.float32)
    safetensors.numpy.save_file(both, second)
    with pytest.raises(hf.HuggingFaceError, match=r"tensor model\.embed_tokens\.weight is in two files"):
        hf.load(tmp_path, SMALL)


def test_a_tied_model_may_ship_its_head_too(tied, tmp_path):
    directory, cfg = tied
    without = hf.load(directory, cfg)
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    read = hf.load(directory, cfg)
    assert_same(read, without)
    # What is written again agrees with itself: tied, and no head in the file.
    hf.save(tmp_path / "again", read, cfg)
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in parse(tmp_path / "again/model.safetensors")


def test_a_tied_model_whose_head_differs_is_refused(tied):
    directory, cfg = tied

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][52, 23] += 1

    edit_weights(directory, differ)
    message = r"lm_head\.weight differs from model\.embed_tokens\.weight, but tie_word_embeddings is true"
    with pytest.raises(hf.HuggingFaceError, match=message):
        hf.load(directory, cfg)
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:52].copy()}))
    with pytest.raises(hf.HuggingFaceError, match=message):
        hf.load(directory, cfg)


def test_head_dim_is_a_field_of_its_own(tmp_path):
    saved(tmp_path)
    shapes = {name: value.shape for name, value in parse(tmp_path / "model.safetensors").items()}
    layer = "model.layers.0.self_attn."
    assert shapes[layer + "q_proj.weight"] == (24, 12)
    assert shapes[layer + "o_proj.weight"] == (12, 24)
    assert shapes[layer + "k_proj.weight"] == shapes[layer + "v_proj.weight"] == (8, 12)
    assert shapes[layer + "q_norm.weight"] == shapes[layer + "k_norm.weight"] == (8,)
    assert hf.config_from_hf(tmp_path).head_dim == 8


def test_head_dim_falls_back_and_then_refuses_other_weights(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, head_dim="absent")
    cfg = hf.config_from_hf(tmp_path)
    assert cfg.head_dim == 4
    with pytest.raises(hf.HuggingFaceError) as error:
        hf.load(tmp_path, cfg)
    # q, k, v, o and both head norms, in each of two layers.
    assert "12 tensors do not fit" in str(error.value)
    assert "model.layers.0.self_attn.q_proj.weight has shape [24, 12], expected [12, 12]" in str(
        error.value
    )
    assert "model.layers.1.self_attn.k_norm.weight has shape [8], expected [4]" in str(error.value)


# --- configurations --------------------------------------------------------------------------------


def test_published_sizes_are_read(tmp_path):
    """The fields of Qwen3-4B-Instruct-2507, as its directory states them."""
    fields = {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert hf.config_from_hf(tmp_path) == qwen3.qwen3_4b(remat="none")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "qwen2"}, r"model_type='qwen2': 'qwen3' is expected"),
        ({"model_type": "absent"}, r"model_type=None: 'qwen3' is expected"),
        ({"attention_bias": True}, r"attention_bias=True: only False is implemented"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1: only 0 is implemented"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu': only 'silu' is implemented"),
        ({"use_sliding_window": True}, r"use_sliding_window=True: only False is implemented"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types has \['sliding_attention'\]",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\}: only None"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling of type 'yarn': only 'default'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            r"rope_parameters of type 'linear': only 'default'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"rope_parameters\.partial_rotary_factor=0\.5: only 1",
        ),
        ({"rope_theta": "absent"}, r"rope_theta=None: a positive number is expected"),
        ({"rope_theta": -1}, r"rope_theta=-1: a positive number is expected"),
        ({"hidden_size": "absent"}, r"hidden_size=None: an integer is expected"),
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers=2\.5: an integer is expected"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0: at least 1 is expected"),
        ({"num_attention_heads": 0, "head_dim": None}, r"num_attention_heads=0: at least 1 is expected"),
        ({"head_dim": 0}, r"head_dim=0: at least 1 is expected"),
        ({"head_dim": 2.5}, r"head_dim=2\.5: an integer is expected"),
        ({"head_dim": 9}, r"head_dim=9: rotary positions need an even size"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps='small': a positive number is expected"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings='false': true or false is expected"),
        ({"rope_scaling": "yarn"}, r"rope_scaling='yarn': an object is expected"),
        ({"num_key_value_heads": 2}, r"num_kv_heads=2: a divisor of num_heads=3"),
        (
            {"head_dim": None, "hidden_size": 13},
            r"head_dim is missing, and hidden_size=13 does not divide by num_attention_heads=3",
        ),
    ],
)
def test_configurations_that_are_not_computed_are_refused(changes, message, tmp_path):
    hf._write_json(tmp_path / "config.json", hf._hf_config(SMALL, np.dtype(np.float32), None, 64))
    edit_config(tmp_path, **changes)
    with pytest.raises(hf.HuggingFaceError, match=message):
        hf.config_from_hf(tmp_path)


def test_no_configuration(tmp_path):
    with pytest.raises(hf.HuggingFaceError, match=r"config\.json does not exist"):
        hf.config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hf.HuggingFaceError, match=r"config\.json is not JSON: "):
        hf.config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(hf.HuggingFaceError, match=r"config\.json: a JSON object is expected, got list"):
        hf.config_from_hf(tmp_path)


# --- what is not written ---------------------------------------------------------------------------


def test_parameters_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    params = random_params(SMALL)
    params["head"] = params.pop("norm")
    params["layers"]["q"] = params["layers"]["q"][:1]
    with pytest.raises(hf.HuggingFaceError) as error:
        hf.save(tmp_path / "m", params, SMALL)
    assert str(error.value).splitlines()[1:] == [
        "  missing ['norm'] (12,)",
        "  not expected: ['head'] (12,)",
        "  ['layers']['q'] has shape (1, 12, 24), expected (2, 12, 24)",
    ]
    assert not (tmp_path / "m").exists()


def test_other_settings_that_are_refused(tmp_path):
    params = saved(tmp_path / "full")
    with pytest.raises(hf.HuggingFaceError, match=r"full holds weights already: model\.safetensors$"):
        hf.save(tmp_path / "full", params, SMALL)
    with pytest.raises(hf.HuggingFaceError, match=r"dtype=float16: float32 or bfloat16 is expected"):
        hf.save(tmp_path / "m", params, SMALL, dtype=jnp.float16)
    with pytest.raises(hf.HuggingFaceError, match=r"max_shard_bytes=0: at least 1 is expected"):
        hf.save(tmp_path / "m", params, SMALL, max_shard_bytes=0)
    word_tokenizer([], max_number=99).save(tmp_path / "tokenizer")
    # <unk>, 100 numbers, 10 pieces, 3 chat tokens.
    with pytest.raises(hf.HuggingFaceError, match=r"tokenizer: 114 tokens, but vocab_size=32"):
        hf.save(tmp_path / "m", params, SMALL, tokenizer_dir=tmp_path / "tokenizer")
    assert not (tmp_path / "m").exists()


def test_writing_that_was_cut_leaves_no_whole_directory(tmp_path, monkeypatch):
    calls = []

    def fail_at_the_second(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("disk full")
        Path(path).write_bytes(safetensors.numpy.save(tensors, metadata))

    monkeypatch.setattr(safetensors.numpy, "save_file", fail_at_the_second)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path, max_shard_bytes=2000)
    with pytest.raises(hf.HuggingFaceError, match=r"neither model\.safetensors nor"):
        hf.load(tmp_path, SMALL)


def test_the_tensors_are_ordered_and_complete():
    shapes = hf._hf_shapes(qwen3.parameter_table(SMALL))
    names = list(shapes)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "model.norm.weight"
    layers = [int(name.split(".")[2]) for name in names[1:-1]]
    assert layers == [0] * 11 + [1] * 11
    assert sum(math.prod(shape) for shape in shapes.values()) == qwen3.parameter_count(SMALL)
