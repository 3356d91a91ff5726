"""The contenders outside JAX: PyTorch and TensorFlow, each where it is installed.

They run on buffers of their own, filled with the same numbers. TensorFlow cannot clip
in place: it pays for fresh memory in every call, as its users do.
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


def clips(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """Clips by global norm."""
    found = {}
    if find_spec("torch"):
        found["PyTorch"] = _torch_clip(arrays, limit, error)
    if has_tensorflow():
        import tensorflow as tf

        found["TensorFlow"] = tensorflow(
            lambda xs: tf.clip_by_global_norm(xs, limit)[0], arrays, error
        )
    return found


def has_tensorflow() -> bool:
    """On a GPU it would take all the memory, and stays out."""
    return jax.default_backend() == "cpu" and find_spec("tensorflow") is not None


def tensorflow(clip: Callable[[Any], Any], arrays: Arrays, error: Error) -> Contender:
    """A clip of a list of tensors, compiled by `tf.function`."""
    import tensorflow as tf

    tensors = [tf.constant(array) for array in arrays]
    compiled = tf.function(clip)

    def call() -> Any:
        result = compiled(tensors)
        # On a CPU all are there when one is.
        result[-1].numpy()
        return result

    return Contender(call, error=lambda found: error([x.numpy() for x in found]))


def to_torch(array: np.ndarray) -> Any:
    """A tensor with a copy of an array, on the device that JAX uses."""
    import torch

    if array.dtype == jnp.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    on_gpu = jax.default_backend() == "gpu"
    return tensor.to("cuda" if on_gpu else "cpu", copy=True)


def to_numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.cpu().numpy()


def _torch_clip(arrays: Arrays, limit: float, error: Error) -> Contender:
    """`clip_grad_norm_` by multi-tensor kernels."""
    import torch

    source = [to_torch(array) for array in arrays]
    gradients = [x.clone() for x in source]
    parameters = [_parameter(x) for x in gradients]

    def call() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        _wait()

    return Contender(
        call,
        lambda: _refill(gradients, source),
        lambda _: error([to_numpy(x) for x in gradients]),
    )


def _parameter(gradient: Any) -> Any:
    """A parameter without memory of its own that has a gradient."""
    import torch

    one = torch.zeros(1, dtype=gradient.dtype, device=gradient.device)
    parameter = one.expand(gradient.shape).requires_grad_()
    parameter.grad = gradient
    return parameter


def torch_steps(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """The fused AdamW of PyTorch, behind its clip and alone."""
    if not find_spec("torch"):
        return {}
    import torch

    parameters = [to_torch(array).requires_grad_() for array in arrays]
    source = [to_torch(array) for array in arrays]
    for parameter, gradient in zip(parameters, source, strict=True):
        parameter.grad = gradient.clone()
    adamw = torch.optim.AdamW(parameters, 1e-4, fused=True)

    def refill() -> None:
        _refill([p.grad for p in parameters], source)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        unclipped()

    def unclipped() -> None:
        adamw.step()
        _wait()

    def error_of_clip(_: Any) -> float:
        return error([to_numpy(p.grad) for p in parameters])

    return {
        "PyTorch": Contender(clipped, refill, error_of_clip),
        "PyTorch, unclipped": Contender(unclipped, refill),
    }


def _refill(into: list[Any], source: list[Any]) -> None:
    for x, y in zip(into, source, strict=True):
        x.copy_(y)
    _wait()


def _wait() -> None:
    import torch

    if jax.default_backend() == "gpu":
        torch.cuda.synchronize()
