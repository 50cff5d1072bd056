"""SERA in JAX: recursive agents that do, decompose and judge with one set of weights."""

from sera_jax.version import __version__

__all__ = ["__version__"]
