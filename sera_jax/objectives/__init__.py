"""Per-token losses, one small file each; any callable of the same signature will do."""

from sera_jax.objectives.base import LossInputs, LossOutputs, Objective
from sera_jax.objectives.cispo import cispo
from sera_jax.objectives.grpo import grpo
from sera_jax.objectives.supervised import supervised

__all__ = ["LossInputs", "LossOutputs", "Objective", "cispo", "grpo", "supervised"]
