"""XLA options for quick compilation, and the default ones."""

import os

import jax

from tests.support import covering

# Compiles in a third of the time; eager operations in half.
UNOPTIMIZED = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
}
if jax.__version_info__ < (0, 12):
    UNOPTIMIZED["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True


def make_quick_default() -> None:
    """Compile without optimizations by default; XLA reads this before its first use."""
    flags = [f"--{name}={str(value).lower()}" for name, value in UNOPTIMIZED.items()]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


def options(chosen: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return arguments of `jax.jit`; with `--full`, XLA's defaults."""
    return {} if covering.full else {"compiler_options": chosen}
