"""Pair each library's clipping with optclip's, over lists of leaves."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import tensorflow as tf
import torch
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional

from .cases import BF16, F32

Leaves = list[Any]


@dataclasses.dataclass(frozen=True)
class Clip:
    """Hold a library's clipping and norm, and the name and options of optclip's."""

    theirs: Callable[[Leaves, float], Leaves]
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    norm: Callable[[Leaves], Any] | None = None

    def functional(self, leaves: Leaves, limit: Any) -> Leaves:
        """Return the clipped leaves, followed by the norm if the library has one."""
        result = getattr(functional, self.name)(leaves, limit, **self.options)
        if not isinstance(result, tuple):
            return result
        clipped, norm = result
        return [*clipped, norm] if self.norm else clipped

    def transformation(self, leaves: Leaves, limit: Any) -> Leaves:
        """Return the updates of the first step."""
        if "use_norm" in self.options:
            # Transformations read a precomputed norm from an extra argument.
            return self.functional(leaves, limit)[: len(leaves)]
        tx = getattr(optclip, self.name)(limit, **self.options)
        return tx.update(leaves, tx.init(leaves))[0]

    @functools.cached_property
    def compiled(self) -> Callable[[Leaves, Any], tuple[Leaves, Leaves]]:
        return jax.jit(
            lambda *arguments: (
                self.functional(*arguments),
                self.transformation(*arguments),
            )
        )


def rows(values: Any, indices: Any, shape: tuple[int, ...]) -> BCOO:
    """Return the BCOO matrix of `tf.IndexedSlices(values, indices, shape)`."""
    columns = jnp.asarray(indices, jnp.int32)[:, None]
    return BCOO((jnp.asarray(values), columns), shape=shape)


def to_tf(x: Any) -> Any:
    if not isinstance(x, BCOO):
        return x
    parts = (np.asarray(x.data), np.asarray(x.indices)[:, 0], x.shape)
    return tf.IndexedSlices(*map(tf.constant, parts))


def per_tensor(function: Callable[..., Any]) -> Callable[[Leaves, float], Leaves]:
    return lambda leaves, limit: [function(to_tf(x), limit) for x in leaves]


def tf_norm(axis: Any) -> Clip:
    axes = list(axis) if isinstance(axis, tuple) else axis
    options = {"axis": axis}
    return Clip(
        per_tensor(lambda x, c: tf.clip_by_norm(x, c, axes)), "clip_by_norm", options
    )


def tf_global(leaves: Leaves, limit: float) -> Leaves:
    return tf.clip_by_global_norm([to_tf(x) for x in leaves], limit)[0]


def in_keras(name: str) -> Callable[[Leaves, float], Leaves]:
    """Clip by one step of SGD from zero with a learning rate of 1."""

    def clip(leaves, limit):
        zeros = [np.zeros_like(leaves[0] if x is None else x) for x in leaves]
        variables = [keras.Variable(x, dtype=str(x.dtype)) for x in zeros]
        optimizer = keras.optimizers.SGD(1.0, **{name: limit})
        optimizer.apply(
            [None if x is None else tf.constant(x) for x in leaves], variables
        )
        return [
            None if x is None else -v.numpy()
            for x, v in zip(leaves, variables, strict=True)
        ]

    return clip


def dense(x: Any) -> Any:
    """Convert sparse gradients of TensorFlow and JAX to dense arrays."""
    if isinstance(x, tf.IndexedSlices):
        return tf.convert_to_tensor(x)
    return x.todense() if isinstance(x, BCOO) else x


def tensor(x: np.ndarray) -> Any:
    """Convert to a tensor, bfloat16 through float32, which is exact."""
    if x.dtype == BF16:
        return torch.tensor(x.astype(F32)).to(torch.bfloat16)
    return torch.tensor(x)


def with_grads(leaves: Leaves) -> list[Any]:
    """Return parameters with these gradients."""
    params = []
    for x in leaves:
        param = torch.nn.Parameter(torch.zeros(()) if x is None else tensor(x * 0))
        param.grad = None if x is None else tensor(x)
        params.append(param)
    return params


def in_torch(function: Callable[..., Any], **options: Any) -> Callable[..., Leaves]:
    """Clip the gradients of parameters in place."""

    def clip(leaves, limit):
        params = with_grads(leaves)
        function(params, limit, **options)
        return [param.grad for param in params]

    return clip


def torch_norm(ord: float, foreach: bool = False) -> Clip:
    theirs = in_torch(torch.nn.utils.clip_grad_norm_, norm_type=ord, foreach=foreach)

    def norm(leaves):
        return torch.nn.utils.get_total_norm([tensor(x) for x in leaves], norm_type=ord)

    return Clip(theirs, "clip_by_global_norm", {"ord": ord, "eps": 1e-6}, norm)


def in_optax(make: Callable[[float], Any]) -> Callable[[Leaves, float], Leaves]:
    def clip(leaves, limit):
        tx = make(limit)
        return tx.update(leaves, tx.init(leaves))[0]

    return clip


PRECOMPUTED_NORM = 2.0
utils = torch.nn.utils
CLIPS = {
    "tf value": Clip(per_tensor(lambda x, c: tf.clip_by_value(x, -c, c)), "clip_by_value"),
    "tf norm": tf_norm(None),
    "tf norm over 0": tf_norm(0),
    "tf norm over 1": tf_norm(1),
    "tf norm over -1": tf_norm(-1),
    "tf norm over 0, 1": tf_norm((0, 1)),
    "tf norm over 1, 2, 3": tf_norm((1, 2, 3)),
    "tf norm over none": tf_norm(()),
    "tf global": Clip(
        tf_global, "clip_by_global_norm",
        norm=lambda leaves: tf.linalg.global_norm([to_tf(x) for x in leaves]),
    ),
    "tf use_norm": Clip(
        lambda leaves, c: tf.clip_by_global_norm(
            leaves, c, use_norm=tf.constant(PRECOMPUTED_NORM, leaves[0].dtype)
        )[0],
        "clip_by_global_norm", {"use_norm": PRECOMPUTED_NORM}, lambda leaves: PRECOMPUTED_NORM,
    ),
    "tf average": Clip(per_tensor(tf.compat.v1.clip_by_average_norm), "clip_by_average_norm"),
    "keras norm": Clip(in_keras("clipnorm"), "clip_by_norm"),
    "keras global": Clip(in_keras("global_clipnorm"), "clip_by_global_norm"),
    "keras value": Clip(in_keras("clipvalue"), "clip_by_value"),
    "torch norm": Clip(in_torch(utils.clip_grad_norm_), "clip_by_global_norm"),
    **{
        f"torch norm of order {ord}": torch_norm(ord, foreach=ord in (0.5, 2.0))
        for ord in (0.5, 1.0, 1.5, 2.0, 4.0, np.inf)
    },
    "torch total_norm": Clip(
        in_torch(utils.clip_grads_with_norm_, total_norm=torch.tensor(PRECOMPUTED_NORM)),
        "clip_by_global_norm", {"use_norm": PRECOMPUTED_NORM, "eps": 1e-6}, lambda leaves: PRECOMPUTED_NORM,
    ),
    "torch value": Clip(in_torch(utils.clip_grad_value_), "clip_by_value"),
    "optax norm": Clip(
        in_optax(optax.clip_by_global_norm), "clip_by_global_norm", norm=optax.tree.norm
    ),
    "optax value": Clip(in_optax(optax.clip), "clip_by_value"),
    "optax rms": Clip(in_optax(optax.clip_by_block_rms), "clip_by_rms"),
}  # fmt: skip
