"""Qwen3 weights in Hugging Face directories, in and out.

A directory holds ``config.json`` and either ``model.safetensors`` or shards that
``model.safetensors.index.json`` names. Names and layouts derive from
:func:`~sera_jax.policy.qwen3.parameter_table`: layers are stacked here and apart there, and a linear
layer is [in, out] here and [out, in] there.

Whatever this code does not compute is refused instead of being ignored: a checkpoint that loads gives
the numbers that its authors meant.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from sera_jax.policy import qwen3
from sera_jax.policy.qwen3 import ArrayInfo, Params, Qwen3Config
from sera_jax.policy.tokenizer import Tokenizer

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F32", "BF16", "F16")
_ROWS = 4096  # vocabulary rows compared at a time
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Fields whose other values would change the forward pass, and what this code computes.
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
}


class HuggingFaceError(ValueError):
    """A directory that cannot be read or written; the message names every file, field or tensor."""


# --- configuration -----------------------------------------------------------------------------


def config_from_hf(directory: str | Path) -> Qwen3Config:
    """Sizes of the model in a directory; computes in bfloat16, stores parameters in float32.

    ``head_dim`` falls back to hidden_size / num_attention_heads where the file has none. Rotary
    settings are read where either generation of the format puts them, at the top or in
    ``rope_parameters``.

    Raises:
      HuggingFaceError: No readable ``config.json``, another model type, a size that is missing or
        impossible, or a feature that is not computed here (biases, dropout, sliding windows, scaled
        rotary positions, quantised weights).
    """
    path = Path(directory) / CONFIG
    if not path.exists():
        raise HuggingFaceError(f"{path} does not exist")
    fields = _read_json(path)
    if fields.get("model_type") != "qwen3":
        raise HuggingFaceError(f"{path}: model_type={fields.get('model_type')!r}: 'qwen3' is expected")
    for name, computed in _COMPUTED.items():
        if fields.get(name) not in computed:
            raise HuggingFaceError(f"{path}: {name}={fields[name]!r}: only {computed[0]!r} is implemented")
    windowed = sorted({kind for kind in fields.get("layer_types") or () if kind != "full_attention"})
    if windowed:
        raise HuggingFaceError(f"{path}: layer_types has {windowed}: only 'full_attention' is implemented")
    tied = fields.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise HuggingFaceError(f"{path}: tie_word_embeddings={tied!r}: true or false is expected")
    rope_theta = _rope_theta(path, fields)
    rms_eps = _positive(path, "rms_norm_eps", fields.get("rms_norm_eps", 1e-6))
    sizes = {ours: _size(path, fields, theirs) for theirs, ours in _SIZES.items()}
    if fields.get("head_dim") is not None:
        head_dim = _size(path, fields, "head_dim")
    elif sizes["hidden_size"] % sizes["num_heads"] == 0:
        head_dim = sizes["hidden_size"] // sizes["num_heads"]
    else:
        raise HuggingFaceError(
            f"{path}: head_dim is missing, and hidden_size={sizes['hidden_size']} does not divide by "
            f"num_attention_heads={sizes['num_heads']}"
        )
    try:
        return Qwen3Config(
            **sizes,
            head_dim=head_dim,
            rope_theta=rope_theta,
            rms_eps=rms_eps,
            tie_embeddings=tied,
        )
    except ValueError as error:
        raise HuggingFaceError(f"{path}: {error}") from error


def _size(path: Path, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise HuggingFaceError(f"{path}: {name}={value!r}: an integer is expected")
    if value < 1:
        raise HuggingFaceError(f"{path}: {name}={value}: at least 1 is expected")
    return value


def _positive(path: Path, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise HuggingFaceError(f"{path}: {name}={value!r}: a positive number is expected")
    return float(value)


def _rope_theta(path: Path, fields: Mapping[str, Any]) -> float:
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name) or {}
        if not isinstance(rope, dict):
            raise HuggingFaceError(f"{path}: {name}={rope!r}: an object is expected")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise HuggingFaceError(f"{path}: {name} of type {kind!r}: only 'default' is implemented")
        share = rope.get("partial_rotary_factor", 1)
        if share != 1:
            raise HuggingFaceError(f"{path}: {name}.partial_rotary_factor={share}: only 1 is implemented")
    theta = fields.get("rope_theta", (fields.get("rope_parameters") or {}).get("rope_theta"))
    return _positive(path, "rope_theta", theta)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise HuggingFaceError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HuggingFaceError(f"{path}: a JSON object is expected, got {type(value).__name__}")
    return value


# --- reading -----------------------------------------------------------------------------------


def load(
    directory: str | Path, cfg: Qwen3Config, shardings: Params | None = None, dtype: Any = None
) -> Params:
    """Parameters of a directory, as :func:`~sera_jax.policy.qwen3.parameter_table` lays them out.

    Every name, shape and file is checked before a value is read. Then arrays are made one at a time
    from memory-mapped files: besides the weights themselves, host memory holds one parameter with all
    its layers, or with ``shardings`` one device's part of it.

    Args:
      directory: Where the files lie.
      cfg: Sizes, usually of :func:`config_from_hf`.
      shardings: One for each parameter, see :func:`~sera_jax.policy.sharding.param_shardings`; None
        leaves everything on the default device.
      dtype: Storage dtype; None is ``cfg.param_dtype``.

    Raises:
      HuggingFaceError: Files are missing or damaged; or tensors are missing, too many, of another shape
        or not floating point: all of them are listed. Also if the head of a tied model is not its
        embedding.
    """
    table = qwen3.parameter_table(cfg)
    dtype = np.dtype(cfg.param_dtype if dtype is None else dtype)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in _weight_files(Path(directory))]
        tensors = _tensors(Path(directory), files)
        _check(Path(directory), table, tensors, cfg)

        def make(info: ArrayInfo, sharding: jax.sharding.Sharding | None) -> jax.Array:
            read = lambda index: _read(info, tensors, index, dtype)
            if sharding is not None:
                return jax.make_array_from_callback(info.shape, sharding, read)
            return jnp.asarray(read((slice(None),) * len(info.shape)))

        if shardings is None:
            shardings = jax.tree.map(lambda _: None, table, is_leaf=qwen3.is_info)
        return jax.tree.map(make, table, shardings, is_leaf=qwen3.is_info)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise HuggingFaceError(f"{index}: weight_map is missing or empty: a file a tensor is expected")
        names = sorted(set(weight_map.values()))
    else:
        names = [SINGLE]
    missing = [name for name in names if not (directory / name).exists()]
    if missing and index.exists():
        raise HuggingFaceError(f"{index} names files that do not exist: {', '.join(missing)}")
    if missing:
        raise HuggingFaceError(f"{directory} holds neither {SINGLE} nor {INDEX}")
    return [directory / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        # A download that was cut, or the pointer to a file in its place.
        raise HuggingFaceError(f"{path} is not a whole safetensors file: {error}") from error


def _tensors(directory: Path, files: list[Any]) -> dict[str, Any]:
    """A slice of every tensor, by name; what the files hold counts, not what the index says."""
    tensors: dict[str, Any] = {}
    for file in files:
        # A safetensors file has keys but is no mapping.
        for name in file.keys():  # noqa: SIM118
            if name in tensors:
                raise HuggingFaceError(f"{directory}: tensor {name} is in two files")
            tensors[name] = file.get_slice(name)
    return tensors


def _hf_names(info: ArrayInfo) -> list[str]:
    """The tensors of a parameter: one, or one a layer."""
    if "{layer}" not in info.hf_name:
        return [info.hf_name]
    return [info.hf_name.format(layer=layer) for layer in range(info.shape[0])]


def _hf_shapes(table: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model, layer by layer, the embedding first and the head last."""
    infos = jax.tree.leaves(table, is_leaf=qwen3.is_info)
    shapes: dict[str, tuple[int, ...]] = {}
    for info in infos:
        names = _hf_names(info)
        shape = info.shape[1:] if "{layer}" in info.hf_name else info.shape
        shapes.update(dict.fromkeys(names, shape[::-1] if info.hf_transposed else shape))

    def order(name: str) -> float:
        if name.startswith("model.layers."):
            return int(name.split(".")[2])
        return -1 if name == _EMBED else math.inf

    return {name: shapes[name] for name in sorted(shapes, key=order)}


def _check(directory: Path, table: Mapping[str, Any], tensors: Mapping[str, Any], cfg: Qwen3Config) -> None:
    expected = _hf_shapes(table)
    faults = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name == _HEAD and cfg.tie_embeddings:
            continue
        if name not in expected:
            faults.append(f"not expected: {name} {tensor.get_shape()}")
        elif tuple(tensor.get_shape()) != expected[name]:
            faults.append(f"{name} has shape {tensor.get_shape()}, expected {list(expected[name])}")
        elif tensor.get_dtype() not in _FLOATS:
            faults.append(f"{name} has dtype {tensor.get_dtype()}, expected {', '.join(_FLOATS)}")
    if faults:
        raise HuggingFaceError(
            f"{directory}: {len(faults)} tensors do not fit the configuration:\n  " + "\n  ".join(faults)
        )
    # A tied model may ship its head as well; one that differs would be lost in silence.
    if cfg.tie_embeddings and _HEAD in tensors:
        same = tensors[_HEAD].get_shape() == tensors[_EMBED].get_shape() and all(
            np.array_equal(tensors[_HEAD][low:high], tensors[_EMBED][low:high])
            for low in range(0, cfg.vocab_size, _ROWS)
            for high in (min(low + _ROWS, cfg.vocab_size),)
        )
        if not same:
            raise HuggingFaceError(
                f"{directory}: {_HEAD} differs from {_EMBED}, but tie_word_embeddings is true"
            )


def _read(
    info: ArrayInfo, tensors: Mapping[str, Any], index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """The part ``index`` of a parameter, read tensor by tensor."""
    names = _hf_names(info)
    stacked = "{layer}" in info.hf_name

    def part(name: str, within: tuple[slice, ...]) -> np.ndarray:
        # safetensors slices want plain bounds, and in the file's order of dimensions.
        value = tensors[name][within[::-1] if info.hf_transposed else within]
        return value.T if info.hf_transposed else value

    whole = tuple(slice(*piece.indices(size)) for piece, size in zip(index, info.shape, strict=True))
    if not stacked:
        return np.ascontiguousarray(part(names[0], whole)).astype(dtype, copy=False)
    result = np.empty([piece.stop - piece.start for piece in whole], dtype)
    for row, name in enumerate(names[whole[0]]):
        result[row] = part(name, whole[1:])
    return result


# --- writing -----------------------------------------------------------------------------------


def save(
    directory: str | Path,
    params: Params,
    cfg: Qwen3Config,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_dir: str | Path | None = None,
    max_position_embeddings: int = 40960,
) -> None:
    """Writes a directory that ``transformers`` and serving engines read.

    One shard at a time is in host memory. The index, or the single file, comes last and by renaming: a
    directory whose writing was cut is not taken for a whole one.

    Args:
      directory: Made if absent; it may not hold weights yet.
      params: See :func:`~sera_jax.policy.qwen3.parameter_table`; sharded arrays are gathered.
      cfg: Sizes.
      dtype: float32 or bfloat16; None is that of the parameters.
      max_shard_bytes: Most bytes of tensors in a file; a larger tensor gets a file of its own.
      tokenizer_dir: Its tokenizer files are copied, and its chat tokens become the end tokens.
      max_position_embeddings: Longest context that the file states; nothing here depends on it.

    Raises:
      HuggingFaceError: Another dtype, parameters that do not fit ``cfg``, a tokenizer with more tokens
        than the vocabulary has rows, or a directory that holds weights already.
    """
    directory = Path(directory)
    dtype = np.dtype(cfg.param_dtype if dtype is None else dtype)
    if dtype not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        raise HuggingFaceError(f"dtype={dtype.name}: float32 or bfloat16 is expected")
    if max_shard_bytes < 1:
        raise HuggingFaceError(f"max_shard_bytes={max_shard_bytes}: at least 1 is expected")
    _check_params(params, cfg)
    held = sorted(path.name for path in directory.glob("*.safetensors*"))
    if held:
        raise HuggingFaceError(f"{directory} holds weights already: {', '.join(held)}")
    tokenizer = None if tokenizer_dir is None else Tokenizer.from_directory(tokenizer_dir)
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise HuggingFaceError(
            f"{tokenizer_dir}: {tokenizer.vocab_size} tokens, but vocab_size={cfg.vocab_size}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / CONFIG, _hf_config(cfg, dtype, tokenizer, max_position_embeddings))
    _write_json(directory / "generation_config.json", _generation_config(tokenizer))
    if tokenizer_dir is not None and Path(tokenizer_dir).resolve() != directory.resolve():
        for path in (Path(tokenizer_dir) / name for name in _TOKENIZER_FILES):
            if path.exists():
                # The content alone: a read-only source must not make a read-only copy.
                shutil.copyfile(path, directory / path.name)
    _write_weights(directory, params, cfg, dtype, max_shard_bytes)


def _write_weights(
    directory: Path, params: Params, cfg: Qwen3Config, dtype: np.dtype, max_shard_bytes: int
) -> None:
    shapes = _hf_shapes(qwen3.parameter_table(cfg))
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    sources = dict(_sources(params, cfg))

    def write(path: Path, names: list[str]) -> None:
        part = path.with_name(path.name + ".part")
        arrays = {name: _hf_array(*sources[name], dtype) for name in names}
        safetensors.numpy.save_file(arrays, part, metadata={"format": "pt"})
        part.replace(path)

    if len(shards) == 1:
        write(directory / SINGLE, shards[0])
        return
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        write(directory / file, names)
    total = sum(math.prod(shape) * dtype.itemsize for shape in shapes.values())
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _sources(params: Params, cfg: Qwen3Config) -> Iterator[tuple[str, tuple[Any, int | None, bool]]]:
    """For each tensor its parameter, layer (None where there is one only) and whether to transpose."""
    infos = jax.tree.leaves(qwen3.parameter_table(cfg), is_leaf=qwen3.is_info)
    for info, value in zip(infos, jax.tree.leaves(params), strict=True):
        stacked = "{layer}" in info.hf_name
        for layer, name in enumerate(_hf_names(info)):
            yield name, (value, layer if stacked else None, info.hf_transposed)


def _hf_array(value: Any, layer: int | None, transposed: bool, dtype: np.dtype) -> np.ndarray:
    array = np.asarray(jax.device_get(value if layer is None else value[layer]))
    # C order: a writer that takes the buffer of a transposed view as it lies scrambles the values.
    return np.ascontiguousarray(array.T if transposed else array, dtype)


def _check_params(params: Params, cfg: Qwen3Config) -> None:
    shape_of = lambda tree: {
        jax.tree_util.keystr(path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    given, expected = shape_of(params), shape_of(qwen3.abstract(cfg))
    faults = [f"missing {name} {shape}" for name, shape in expected.items() if name not in given]
    faults += [f"not expected: {name} {shape}" for name, shape in given.items() if name not in expected]
    faults += [
        f"{name} has shape {given[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    if faults:
        raise HuggingFaceError("parameters do not fit the configuration:\n  " + "\n  ".join(faults))


def _hf_config(
    cfg: Qwen3Config, dtype: np.dtype, tokenizer: Tokenizer | None, max_position_embeddings: int
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{theirs: getattr(cfg, ours) for theirs, ours in _SIZES.items()},
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.rms_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": cfg.num_layers,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.02,
        "tie_word_embeddings": cfg.tie_embeddings,
        "use_cache": True,
        "torch_dtype": dtype.name,
        "bos_token_id": None,
        "eos_token_id": None if tokenizer is None else tokenizer.im_end,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_id,
    }


def _generation_config(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    return {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)
