"""SERA on TextCraft-Synth (SERA, arXiv 2610.04902, Table 1, row "SERA").

    python -m experiments.train --config=experiments/configs/textcraft_sera.py --workdir=runs/sera \
        --config.policy.checkpoint=DIR

Published: 74.31 +- 0.90 % over the 632 test tasks (Easy 99.09, Medium 97.81, Hard 78.92, Extreme 6.13),
mean of three seeds, checkpoint of step 250, Qwen3-4B-Instruct-2507, 24 h on 2 x 8 H200. Not run here at
this size: prompts are our own and the protocol is ``structured``, so numbers will not be comparable.

Variants, after a colon:

    paper   (default) the published sizes: 8 tasks x 8 trees, 20 turns, depth 3, 16 : 2 : 2, lr 3e-6
    tiny    a toy world and a policy of 0.57 million parameters that learns on two CPU cores in minutes
    easy    the tiny policy on the published Easy records with their real item names
    smoke   a few steps of everything, for tests
"""

import dataclasses

from sera_jax.config import (
    Config,
    CreditConfig,
    EnvironmentConfig,
    LearnerConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RubricConfig,
    RunConfig,
    WarmStartConfig,
    to_config_dict,
)

VARIANTS = ("paper", "tiny", "easy", "smoke")


def get_config(variant: str = "paper"):
    """The settings of ``variant`` as a ConfigDict."""
    return to_config_dict(make(variant or "paper"))


def make(variant: str) -> Config:
    """The settings of ``variant``."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}: one of {', '.join(VARIANTS)} is expected")
    if variant == "paper":
        return Config(name="textcraft_sera")
    return {"tiny": tiny, "easy": easy, "smoke": smoke}[variant]()


def tiny() -> Config:
    """Small enough to learn while you watch."""
    return Config(
        name="textcraft_sera_tiny",
        schedule="execution:8,delegation:1,rubric:1",
        environment=EnvironmentConfig(world="toy"),
        policy=PolicyConfig(size="tiny", dtype="float32"),
        rollout=RolloutConfig(
            max_turns=8,
            max_depth=2,
            max_tokens=16,
            context_length=128,
            slots=256,
            decode_chunk=8,
            deadline_seconds=None,
        ),
        rubric=RubricConfig(codec="compact", writer_tokens=40, scorer_tokens=16),
        credit=CreditConfig(execution_baseline="per_depth"),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        learner=LearnerConfig(row_length=128, micro_rows=16),
        warm_start=WarmStartConfig(steps=1200),
        run=RunConfig(steps=120, checkpoint_every=20, eval_every=30, eval_tasks=128, save_trees_every=10),
    )


def easy() -> Config:
    """The tiny policy with the published Easy records: 1,452 item names, one token each."""
    base = tiny()
    return dataclasses.replace(
        base,
        name="textcraft_sera_easy",
        environment=EnvironmentConfig(world="published", train_tier="easy"),
        rollout=dataclasses.replace(base.rollout, max_turns=12, context_length=192),
        learner=LearnerConfig(row_length=192, micro_rows=16),
    )


def smoke() -> Config:
    """All stages in a few small steps, on one-step tasks that even this policy sometimes solves."""
    base = tiny()
    return dataclasses.replace(
        base,
        name="textcraft_sera_smoke",
        schedule="execution:1,delegation:1,rubric:1",
        environment=EnvironmentConfig(world="toy", toy_tiers=(2,), toy_counts=(1,), toy_items_per_tier=2),
        policy=PolicyConfig(
            size="tiny", dtype="float32", layers=2, width=64, heads=2, kv_heads=1, head_dim=32, ffn=128
        ),
        rollout=dataclasses.replace(base.rollout, tasks_per_step=2, group_size=4, slots=16),
        learner=LearnerConfig(row_length=128, micro_rows=8),
        warm_start=WarmStartConfig(steps=250, trees=150, scorer_examples=1, warmup_steps=10),
        run=RunConfig(steps=3, checkpoint_every=1, eval_tasks=4, save_trees_every=1),
    )
