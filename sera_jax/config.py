"""Configuration: frozen dataclasses, built once from an ``ml_collections.ConfigDict`` and validated here.

A config file's ``get_config(arg)`` returns :func:`to_config_dict` of a :class:`Config`, so that command
line overrides (``--config.optimizer.learning_rate=1e-4``) are typed and unknown names are refused.
:func:`from_config_dict` turns the result into a :class:`Config`; nothing else in the package validates
settings, and nothing else sees a ConfigDict.

A field is documented where it stands. Defaults follow the method as its authors describe it
(SERA, arXiv 2610.04902) at the sizes of its TextCraft-Synth runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from sera_jax.schedule import Schedule


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field, the value and what is allowed."""


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """What is played."""

    name: str = "textcraft"
    # "toy" is a generated world for tiny policies; "published" is the released world and its records.
    world: str = "published"
    protocol: str = "structured"
    # Published world: the tier that is trained on. Toy worlds use `toy_tiers`.
    train_tier: str = "medium"
    # Toy world: its recipe book is fixed by this seed, apart from the run's own seed.
    world_seed: int = 0
    toy_domains: int = 2
    toy_max_tier: int = 3
    toy_items_per_tier: int = 5
    toy_tiers: tuple[int, ...] = (2, 3)
    toy_counts: tuple[int, ...] = (1, 2)
    # Share of the (item, count) pairs that training never sees.
    toy_unseen_fraction: float = 0.2


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Which weights. ``checkpoint`` is a Hugging Face directory; without one, ``size`` is initialised."""

    checkpoint: str | None = None
    size: str = "qwen3_4b"
    dtype: str = "bfloat16"
    # Sizes of `size="tiny"`.
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 32
    ffn: int = 256


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How trees are sampled."""

    tasks_per_step: int = 8  # P
    group_size: int = 8  # K trees a task
    max_turns: int = 20  # of every node, the root included
    max_depth: int = 3  # nodes at this depth cannot launch
    max_tokens: int = 512  # of one turn
    context_length: int = 10240
    temperature: float = 1.0
    slots: int = 64  # sequences that the local engine holds at once
    decode_chunk: int = 16
    deadline_seconds: float | None = 3600.0  # of one tree; None for no limit


@dataclasses.dataclass(frozen=True)
class RubricConfig:
    """How rubrics are written and scored."""

    codec: str = "json"  # "json" for language models, "compact" for tiny policies
    writer_tokens: int = 1024
    scorer_tokens: int = 1024
    writer_temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class CounterfactualConfig:
    """The rubric stage's branches and their ranking."""

    branches: int = 8  # B
    budget: int = 16  # soft cap on the worlds of one tree: 1 -> 9 -> 17
    margin: float = 0.2
    objective: str = "rank"  # or "rank_disc"


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    """How rewards become advantages."""

    # "rubric": a child's reward is its score; "program": its verified success (RAO).
    execution_reward: str = "rubric"
    # "root": mean root success of the task's other trees; "per_depth": leave-one-out at the same depth.
    execution_baseline: str = "root"
    # Leave-one-out over the ranked groups of the whole "batch" or of the same "task".
    rubric_baseline: str = "batch"
    depth_weights: bool = True


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The per-token loss. Ratio bounds are absolute; the anchor is the sampler's log-prob."""

    name: str = "cispo"  # or "grpo"
    ratio_min: float = 0.0
    ratio_max: float = 5.0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay and a global-norm clip."""

    learning_rate: float = 3e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.017
    clip_norm: float = 1.0
    warmup_steps: int = 1


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """How samples become rows and rows become micro-batches."""

    row_length: int = 10240
    micro_rows: int = 4  # rows of one forward and backward pass


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised start of a tiny policy on a scripted agent's imperfect demonstrations; 0 steps: none."""

    steps: int = 0
    trees: int = 2000
    rows: int = 8  # rows of one supervised step
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    # Probability that a demonstrated decision is wrong, by kind; see envs.textcraft.oracle.Mistakes.
    mistake_rate: float = 0.1
    # Share of demonstrated rubrics that ask for the right amount of the right item.
    good_rubrics: float = 0.5
    # Extra scorer examples for each scored child of a demonstration.
    scorer_examples: int = 4


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, and what it leaves behind."""

    steps: int = 250
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    eval_every: int = 0  # 0: only before the first and after the last update
    eval_tasks: int = 100
    save_trees_every: int = 1  # 0: never


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on, besides the code and the machine."""

    seed: int = 0
    name: str = "sera"
    schedule: str = "execution:16,delegation:2,rubric:2"
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    rubric: RubricConfig = dataclasses.field(default_factory=RubricConfig)
    counterfactual: CounterfactualConfig = dataclasses.field(default_factory=CounterfactualConfig)
    credit: CreditConfig = dataclasses.field(default_factory=CreditConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)


_CHOICES: dict[str, tuple[str, ...]] = {
    "environment.name": ("textcraft",),
    "environment.world": ("toy", "published"),
    "environment.protocol": ("structured",),
    "environment.train_tier": ("easy", "medium", "hard", "extreme", "all"),
    "policy.size": ("tiny", "qwen3_0_6b", "qwen3_1_7b", "qwen3_4b"),
    "policy.dtype": ("float32", "bfloat16"),
    "rubric.codec": ("json", "compact"),
    "counterfactual.objective": ("rank", "rank_disc"),
    "credit.execution_reward": ("rubric", "program"),
    "credit.execution_baseline": ("root", "per_depth"),
    "credit.rubric_baseline": ("batch", "task"),
    "objective.name": ("cispo", "grpo"),
}

# Fields with a closed range [low, high]; None is no bound. Booleans and tuples are checked by hand.
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, None),
    "environment.toy_domains": (1, 8),
    "environment.toy_max_tier": (2, 12),
    "environment.toy_items_per_tier": (1, 99),
    "environment.toy_unseen_fraction": (0.0, 0.9),
    "policy.layers": (1, None),
    "policy.width": (1, None),
    "policy.heads": (1, None),
    "policy.kv_heads": (1, None),
    "policy.head_dim": (2, None),
    "policy.ffn": (1, None),
    "rollout.tasks_per_step": (1, None),
    "rollout.group_size": (2, None),  # leave-one-out needs another tree
    "rollout.max_turns": (1, None),
    "rollout.max_depth": (0, 8),
    "rollout.max_tokens": (1, None),
    "rollout.context_length": (8, None),
    "rollout.temperature": (1e-3, 100.0),
    "rollout.slots": (1, None),
    "rollout.decode_chunk": (1, None),
    "rollout.deadline_seconds": (1e-3, None),
    "rubric.writer_tokens": (1, None),
    "rubric.scorer_tokens": (1, None),
    "rubric.writer_temperature": (1e-3, 100.0),
    "counterfactual.branches": (2, 64),
    "counterfactual.budget": (1, None),
    "counterfactual.margin": (1e-6, 1.0),
    "objective.ratio_min": (0.0, None),
    "objective.ratio_max": (0.0, None),
    "optimizer.learning_rate": (0.0, None),
    "optimizer.beta1": (0.0, 0.9999999),
    "optimizer.beta2": (0.0, 0.9999999),
    "optimizer.eps": (0.0, None),
    "optimizer.weight_decay": (0.0, None),
    "optimizer.clip_norm": (1e-12, None),
    "optimizer.warmup_steps": (0, None),
    "learner.row_length": (8, None),
    "learner.micro_rows": (1, None),
    "warm_start.steps": (0, None),
    "warm_start.trees": (1, None),
    "warm_start.rows": (1, None),
    "warm_start.learning_rate": (0.0, None),
    "warm_start.warmup_steps": (0, None),
    "warm_start.mistake_rate": (0.0, 1.0),
    "warm_start.good_rubrics": (0.0, 1.0),
    "warm_start.scorer_examples": (0, None),
    "run.steps": (0, None),
    "run.checkpoint_every": (1, None),
    "run.keep_checkpoints": (1, None),
    "run.eval_every": (0, None),
    "run.eval_tasks": (0, None),
    "run.save_trees_every": (0, None),
}


def to_config_dict(config: Config) -> config_dict.ConfigDict:
    """The same settings as a locked ConfigDict; optional fields become typed placeholders."""
    result = _to_config_dict(config)
    result.lock()
    return result


def _to_config_dict(node: Any) -> config_dict.ConfigDict:
    result = config_dict.ConfigDict()
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            result[field.name] = _to_config_dict(value)
            continue
        optional = _optional_type(hints[field.name])
        if optional is not None:
            # A plain None would accept any type later, and a plain value would refuse None.
            result[field.name] = config_dict.placeholder(optional)
        result[field.name] = value
    return result


def from_config_dict(settings: Mapping[str, Any] | config_dict.ConfigDict) -> Config:
    """Builds and validates a :class:`Config`; raises :class:`ConfigError` for anything off."""
    if isinstance(settings, config_dict.ConfigDict):
        settings = settings.to_dict()
    config = _build(Config, settings, "")
    validate(config)
    return config


def _optional_type(hint: Any) -> type | None:
    if isinstance(hint, types.UnionType):
        arguments = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(arguments) == 1:
            return arguments[0]
    return None


def _build(cls: type, settings: Mapping[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for name in settings:
        if name not in names:
            raise ConfigError(
                f"unknown setting {path}{name}; {path or 'the config '}has {', '.join(names)}"
            )
    values = {}
    for name, value in settings.items():
        hint, where = hints[name], f"{path}{name}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}={value!r}: a group of settings is expected")
            values[name] = _build(hint, value, f"{where}.")
        else:
            values[name] = _convert(hint, value, where)
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    optional = _optional_type(hint)
    if optional is not None:
        if value is None:
            return None
        hint = optional
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{where}={value!r}: a tuple is expected")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}={value!r}: {hint.__name__} is expected, not {type(value).__name__}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where}={value!r}: a finite number is expected")
    return value


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def validate(config: Config) -> None:
    """Raises :class:`ConfigError` for a value out of range or knobs that cannot work together."""
    for path, allowed in _CHOICES.items():
        if _get(config, path) not in allowed:
            raise ConfigError(f"{path}={_get(config, path)!r}: one of {', '.join(allowed)} is expected")
    for path, (low, high) in _RANGES.items():
        value = _get(config, path)
        if value is None:
            continue
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{path}={value!r}: {bounds} is expected")
    objective, rollout = config.objective, config.rollout
    if objective.ratio_max <= objective.ratio_min:
        raise ConfigError(
            f"objective.ratio_max={objective.ratio_max}: more than ratio_min={objective.ratio_min} "
            "is expected; both are absolute bounds of the ratio"
        )
    if rollout.max_tokens >= rollout.context_length:
        raise ConfigError(
            f"rollout.max_tokens={rollout.max_tokens}: less than "
            f"rollout.context_length={rollout.context_length} is expected"
        )
    if config.learner.row_length < rollout.context_length:
        raise ConfigError(
            f"learner.row_length={config.learner.row_length}: at least "
            f"rollout.context_length={rollout.context_length} is expected, or a full node cannot be trained"
        )
    if config.policy.heads % config.policy.kv_heads:
        raise ConfigError(
            f"policy.kv_heads={config.policy.kv_heads}: a divisor of policy.heads={config.policy.heads} "
            "is expected"
        )
    if config.policy.size == "tiny" and config.policy.checkpoint is not None:
        raise ConfigError(
            f"policy.checkpoint={config.policy.checkpoint!r}: a tiny policy is made here, with its own "
            "tokenizer; choose another policy.size"
        )
    if config.policy.size == "tiny" and config.rubric.codec == "json":
        raise ConfigError("rubric.codec='json': a tiny policy's vocabulary holds 'compact' only")
    if config.policy.size != "tiny" and config.warm_start.steps:
        raise ConfigError(
            f"warm_start.steps={config.warm_start.steps}: only policy.size='tiny' has a warm start"
        )
    if config.policy.size != "tiny" and config.policy.checkpoint is None:
        raise ConfigError(
            f"policy.checkpoint=None: policy.size={config.policy.size!r} needs a Hugging Face directory "
            "for its weights and tokenizer"
        )
    tiers = config.environment.toy_tiers
    if not tiers or min(tiers) < 1 or max(tiers) > config.environment.toy_max_tier:
        raise ConfigError(
            f"environment.toy_tiers={tiers}: tiers between 1 and "
            f"environment.toy_max_tier={config.environment.toy_max_tier} are expected"
        )
    counts = config.environment.toy_counts
    if not counts or min(counts) < 1:
        raise ConfigError(f"environment.toy_counts={counts}: positive counts are expected")
    Schedule.parse(config.schedule)


def as_dict(config: Config) -> dict[str, Any]:
    """Plain data, as written to ``config.json``."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def fingerprint(config: Config) -> str:
    """Twelve hexadecimal digits that change with any setting except the length of the run."""
    settings = as_dict(config)
    for name in ("steps", "keep_checkpoints"):
        settings["run"].pop(name)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def difference(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Lines ``path: old -> new`` for all settings in which two plain-data configs differ."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += difference(before, after, f"{path}{name}.")
        elif before != after:
            lines.append(f"{path}{name}: {before!r} -> {after!r}")
    return lines
