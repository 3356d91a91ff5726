"""The contenders outside JAX: PyTorch and TensorFlow, each where it is installed.

They run on the CPU, on buffers of their own filled with the same numbers. TensorFlow
cannot clip in place: it pays for fresh memory in every call, as its users do.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Contender

Arrays = Sequence[np.ndarray]
Error = Callable[[Any], float]


def has(package: str) -> bool:
    return jax.default_backend() == "cpu" and find_spec(package) is not None


def clips(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """Clips by global norm."""
    found = {}
    if has("torch"):
        parameters, refill, clip = _torch(arrays, limit)
        found["PyTorch"] = Contender(clip, refill, _torch_error(parameters, error))
    if has("tensorflow"):
        found["TensorFlow"] = _tensorflow_clip(arrays, limit, error)
    return found


def _tensorflow_clip(arrays: Arrays, limit: float, error: Error) -> Contender:
    import tensorflow as tf

    tensors = [tf.constant(array) for array in arrays]
    clip = tf.function(lambda xs: tf.clip_by_global_norm(xs, limit))

    def call() -> Any:
        clipped, norm = clip(tensors)
        # All of the call has run when one result is there.
        norm.numpy()
        return clipped

    return Contender(call, error=lambda found: error([x.numpy() for x in found]))


def torch_steps(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """The fused AdamW of PyTorch, behind its clip and alone."""
    if not has("torch"):
        return {}
    import torch

    parameters, refill, clip = _torch(arrays, limit)
    adamw = torch.optim.AdamW(parameters, 1e-4, fused=True)

    def clipped() -> None:
        clip()
        adamw.step()

    return {
        "PyTorch": Contender(clipped, refill, _torch_error(parameters, error)),
        "PyTorch, unclipped": Contender(adamw.step, refill),
    }


def _torch(arrays: Arrays, limit: float) -> tuple[list[Any], Any, Any]:
    """Parameters with gradients, what fills these again, and what clips them."""
    import torch

    source = [torch.from_dlpack(jnp.asarray(array)) for array in arrays]
    parameters = [x.clone().requires_grad_() for x in source]
    for parameter, gradient in zip(parameters, source, strict=True):
        parameter.grad = gradient.clone()

    def refill() -> None:
        for parameter, gradient in zip(parameters, source, strict=True):
            parameter.grad.copy_(gradient)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)

    return parameters, refill, clip


def _torch_error(parameters: list[Any], error: Error) -> Error:
    return lambda _: error([jnp.from_dlpack(p.grad) for p in parameters])
