"""The contenders outside JAX: PyTorch and TensorFlow, each where it is installed.

They run on buffers of their own filled with the same numbers: PyTorch where JAX runs,
TensorFlow on the CPU alone. TensorFlow cannot clip in place: it pays for fresh memory
in every call, as its users do.
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
    """Return why a library does not take part, "" if it does."""
    if find_spec(package) is None:
        return f"{package} is not installed"
    if jax.default_backend() == "cpu":
        return ""
    if package == "torch":
        import torch

        return "" if torch.cuda.is_available() else "torch does not find the GPU"
    return f"{package} runs on the CPU alone here"


def clips(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """Clips by global norm."""
    found = {}
    if not absent("torch"):
        found |= _torch_clips(arrays, limit, error)
    # TensorFlow stacks the norms of leaves, which must have one dtype.
    if not absent("tensorflow") and len({x.dtype for x in arrays}) == 1:
        found["TensorFlow"] = _tensorflow_clip(arrays, limit, error)
    return found


def _torch_clips(arrays: Arrays, limit: float, error: Error) -> dict[str, Contender]:
    """The whole clipping, and its second half alone, given the norm."""
    import torch

    utils = torch.nn.utils
    parameters, refill = _torch(arrays)
    norm = utils.get_total_norm([p.grad for p in parameters], foreach=True)
    calls = {
        "PyTorch": lambda: utils.clip_grad_norm_(parameters, limit, foreach=True),
        "PyTorch, norm given": lambda: utils.clip_grads_with_norm_(
            parameters, limit, norm, foreach=True
        ),
    }
    wrong = _torch_error(parameters, error)
    return {
        name: Contender(_finished(call), refill, wrong) for name, call in calls.items()
    }


def _finished(call: Callable[[], Any]) -> Callable[[], None]:
    """The call, and the wait for a GPU."""
    import torch

    def finished() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return finished


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
    if absent("torch"):
        return {}
    import torch

    parameters, refill = _torch(arrays)
    adamw = torch.optim.AdamW(parameters, 1e-4, fused=True)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        adamw.step()

    wrong = _torch_error(parameters, error)
    return {
        "PyTorch": Contender(_finished(clipped), refill, wrong),
        "PyTorch, unclipped": Contender(_finished(adamw.step), refill),
    }


def _torch(arrays: Arrays) -> tuple[list[Any], Callable[[], None]]:
    """Parameters with gradients, and a function that fills these again."""
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
