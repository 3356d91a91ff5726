"""Compile for a GPU: for the one of this machine, or for an H100 without one.

XLA compiles for a GPU that it is given a description of. This needs the CUDA plugin of
JAX on Linux and x86-64, but no driver and no other CUDA library. Without a GPU, JAX
loads the plugin only with `JAX_PLATFORMS=cpu`.
"""

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Choosing the kernels of matrix products by timing them needs a GPU.
WITHOUT_GPU: dict[str, Any] = {"xla_gpu_autotune_level": 0}


class Program(NamedTuple):
    """Hold a program that XLA has compiled for a GPU.

    Attributes:
      text: The optimized program.
      buffers: XLA's assignment of its values to allocations, as text.
      temporaries: The bytes of its temporary buffers.
    """

    text: str
    buffers: str
    temporaries: int


@functools.cache
def devices(topology: str = "1x1x1") -> list[Any]:
    """Return the H100s of a topology: hosts x GPUs per host x 1, without any GPU."""
    described = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=topology
    )
    return list(described.devices)


@functools.cache
def place() -> tuple[Sharding, str]:
    """Return the GPU to compile for, and its name.

    Raises:
      RuntimeError: There is no GPU, and no plugin that compiles without one.
    """
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        return SingleDeviceSharding(device), device.device_kind
    try:
        return SingleDeviceSharding(devices()[0]), "H100, compiled without a GPU"
    except Exception as error:
        advice = 'pip install "jax[cuda12]", then run with JAX_PLATFORMS=cpu'
        raise RuntimeError(f"no compiler for GPUs; {advice}") from error


def placed(tree: Any, sharding: Sharding | None = None) -> Any:
    """Return shapes on the GPU to compile for, or with another sharding."""
    sharding = place()[0] if sharding is None else sharding
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def compiled(
    function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> Program:
    """Compile a function of placed shapes."""
    lowered = jax.jit(function, donate_argnums=donate).lower(*shapes)
    options = {} if jax.default_backend() == "gpu" else WITHOUT_GPU
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        executable = lowered.compile(compiler_options={**options, **dump})
        # Compiling a large constant expression writes small programs too.
        found = pathlib.Path(folder).glob("*after_optimizations-buffer-assignment.txt")
        buffers = max((path.read_text() for path in found), key=len)
    text, memory = executable.as_text(), executable.memory_analysis()
    assert text is not None
    assert memory is not None
    return Program(text, buffers, memory.temp_size_in_bytes)
