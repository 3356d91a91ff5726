"""The contenders outside JAX: PyTorch and TensorFlow, each where installed.

They run on buffers of their own, filled with the same numbers. TensorFlow cannot clip
in place: it pays for fresh memory in every call, as its users do.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from benchmarks import trees
from benchmarks.oracle import Oracle
from benchmarks.timing import Contender

Arrays = list[np.ndarray]


def races(what: str, oracle: Oracle) -> tuple[dict[str, Contender], dict[str, Any]]:
    """The foreign contenders, and rows that say which of them refused."""
    found: dict[str, Contender] = {}
    refused: dict[str, Any] = {}
    for name, package, make in (
        ("PyTorch", "torch", torch_contender),
        ("TensorFlow", "tensorflow", tensorflow_contender),
    ):
        if find_spec(package) is None or (name == "TensorFlow" and _on_gpu()):
            continue
        try:
            contender = make(what, oracle)
            contender.prepare()
            contender.call()
        except Exception as error:  # which kind is up to the library
            refused[name] = {"refuses": refusal(error)}
        else:
            found[name] = contender
    return found, refused


def _on_gpu() -> bool:
    """Whether JAX runs on a GPU, of which TensorFlow would take all the memory."""
    return jax.default_backend() == "gpu"


def to_torch(array: np.ndarray) -> Any:
    """A PyTorch tensor with a copy of an array, on the device that JAX uses."""
    import torch

    if array.dtype == trees.DTYPES["bf16"][0]:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to("cuda" if _on_gpu() else "cpu", copy=True)


def torch_contender(what: str, oracle: Oracle) -> Contender:
    """`clip_grad_norm_` or its norm alone, by multi-tensor kernels."""
    import torch

    source = [to_torch(array) for array in oracle.arrays]
    if what == "norm":

        def norm() -> Any:
            return torch_wait(torch.nn.utils.get_total_norm(source, foreach=True))

        return Contender(norm, inspect=oracle.of_norm("PyTorch"))
    gradients = [x.clone() for x in source]
    parameters = [_parameter(x) for x in gradients]

    def clip() -> Any:
        return torch_wait(
            torch.nn.utils.clip_grad_norm_(parameters, oracle.limit, foreach=True)
        )

    def inspect(_: Any) -> dict[str, Any]:
        arrays = [x.cpu().float().numpy() for x in gradients]
        return oracle.of_clipped("PyTorch")(arrays)

    return Contender(clip, lambda: torch_refill(gradients, source), inspect)


def _parameter(gradient: Any) -> Any:
    """A parameter without memory of its own that holds a gradient."""
    import torch

    one = torch.zeros(1, dtype=gradient.dtype, device=gradient.device)
    parameter = one.expand(gradient.shape).requires_grad_()
    parameter.grad = gradient
    return parameter


def torch_refill(into: list[Any], source: list[Any]) -> None:
    """Copy tensors into others, untimed."""
    for x, y in zip(into, source, strict=True):
        x.copy_(y)
    torch_wait(None)


def torch_wait(result: Any) -> Any:
    """The result, once it is there."""
    import torch

    if _on_gpu():
        torch.cuda.synchronize()
    return result


def refusal(error: Exception) -> str:
    """The last line of an error: those before it may name files of this machine."""
    last = str(error).strip().splitlines()[-1].strip()
    return f"{type(error).__name__}: {last}"[:200]


def tensorflow_contender(what: str, oracle: Oracle) -> Contender:
    """`tf.clip_by_global_norm` or `tf.linalg.global_norm` in a `tf.function`."""
    import tensorflow as tf

    tensors = [tf.constant(array) for array in oracle.arrays]
    if what == "norm":
        norm = tf.function(tf.linalg.global_norm)
        return Contender(
            lambda: norm(tensors).numpy(), inspect=oracle.of_norm("TensorFlow")
        )
    clip = tf.function(lambda xs: tf.clip_by_global_norm(xs, oracle.limit))

    def inspect(result: Any) -> dict[str, Any]:
        return oracle.of_clipped("TensorFlow")([x.numpy() for x in result[0]])

    return Contender(_waiting(lambda: clip(tensors)), inspect=inspect)


def _waiting(call: Callable[[], Any]) -> Callable[[], Any]:
    """A TensorFlow call that ends when its norm has been read."""

    def run() -> Any:
        result = call()
        result[1].numpy()
        return result

    return run
