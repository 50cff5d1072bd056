"""Guards for every test: rank promotion is an error, NaNs stop at their origin, eight CPU devices."""

import os

# Before jax starts: mesh tests need several devices; tests do not need several processes.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

# Shapes and dtypes in the annotations of algorithm code are checked at run time in tests.
_HOOK = install_import_hook(["sera_jax.credit", "sera_jax.objectives", "kernels"], "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_nans", True)
