"""Build contenders from PyTorch and TensorFlow, if they are installed.

They clip the same numbers in buffers of their own. PyTorch runs on JAX's device,
TensorFlow only on the CPU. TensorFlow cannot clip in place, so each call allocates
memory, as in its users' programs.
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


def absent(package: str) -> str:
    """Return the reason why a library is not measured, or "" if it is."""
    if find_spec(package) is None:
        return f"{package} is not installed"
    if jax.default_backend() == "cpu":
        return ""
    if package == "torch":
        import torch

        return "" if torch.cuda.is_available() else "torch does not find the GPU"
    return f"{package} is measured only on CPU"


def clips(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """Build the contenders for global-norm clipping."""
    contenders = {}
    if not absent("torch"):
        contenders |= _torch_clips(arrays, limit, error)
    # TensorFlow stacks the norms of leaves, so they must have the same dtype.
    if not absent("tensorflow") and len({x.dtype for x in arrays}) == 1:
        contenders["TensorFlow"] = _tensorflow_clip(arrays, limit, error)
    return contenders


def _torch_clips(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """Build clipping by PyTorch with the norm, and with a precomputed norm."""
    import torch

    utils = torch.nn.utils
    parameters, refill = _torch(arrays)
    norm = utils.get_total_norm([p.grad for p in parameters], foreach=True)
    calls = {
        "PyTorch": lambda: utils.clip_grad_norm_(parameters, limit, foreach=True),
        "PyTorch, precomputed norm": lambda: utils.clip_grads_with_norm_(
            parameters, limit, norm, foreach=True
        ),
    }
    torch_error = _torch_error(parameters, error)
    return {
        name: Contender(_synchronized(call), refill, torch_error)
        for name, call in calls.items()
    }


def _synchronized(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls and then waits for the GPU."""
    import torch

    def synchronized() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return synchronized


def _tensorflow_clip(arrays: Arrays, limit: float, error: Error) -> Contender:
    import tensorflow as tf

    tensors = [tf.constant(array) for array in arrays]
    clip = tf.function(lambda xs: tf.clip_by_global_norm(xs, limit))

    def call() -> Any:
        clipped, norm = clip(tensors)
        # Reading one result waits for the whole call.
        norm.numpy()
        return clipped

    return Contender(call, error=lambda clipped: error([x.numpy() for x in clipped]))


def torch_steps(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """Build PyTorch's fused AdamW, with and without its clipping."""
    if absent("torch"):
        return {}
    import torch

    parameters, refill = _torch(arrays)
    adamw = torch.optim.AdamW(parameters, 1e-4, fused=True)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        adamw.step()

    return {
        "PyTorch": Contender(
            _synchronized(clipped), refill, _torch_error(parameters, error)
        ),
        "PyTorch, unclipped": Contender(_synchronized(adamw.step), refill),
    }


def _torch(arrays: Arrays) -> tuple[list[Any], Callable[[], None]]:
    """Return parameters with gradients, and a function that restores the gradients."""
    import torch

    source = [torch.from_dlpack(jnp.asarray(array)) for array in arrays]
    parameters = [x.clone().requires_grad_() for x in source]
    for parameter, gradient in zip(parameters, source, strict=True):
        parameter.grad = gradient.clone()

    def refill() -> None:
        for parameter, gradient in zip(parameters, source, strict=True):
            parameter.grad.copy_(gradient)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return parameters, refill


def _torch_error(parameters: list[Any], error: Error) -> Error:
    return lambda _: error([jnp.from_dlpack(p.grad) for p in parameters])
