"""The spectral norm, the largest singular value: the one norm that is no sum."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optclip._arrays import _validate
from optclip._arrays._types import AxisName
from optclip.norms import _matrices
from optclip.norms._norm import AVERAGE, INF, L1, L2, RMS, Block, Norm


@dataclasses.dataclass(frozen=True)
class Spectral(Norm):
    r"""The spectral norm of a matrix, its largest singular value :math:`\sigma_1`.

    A vector is a matrix with one singular value, its L2 norm. `"spectral"` names it
    where a norm is asked for; give `over=optclip.matrices()` with it, or `"leaf"` where
    no leaf has more than two axes.

    Args:
      method: `"exact"` takes the largest eigenvalue of the Gram matrix of the smaller
        side, right to 1e-5; `"power_iteration"` starts from the singular vector of the
        step before and costs two products with a vector an iteration. What it finds is
        never above the norm; see `optclip.clip_by_spectral_norm`.
      steps: how many iterations `"power_iteration"` makes in each step.

    Raises:
      ValueError: there is no such method, or `steps` is below 1.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over="leaf", norm=optclip.norms.Spectral())
      >>> kernel = jnp.array([[0.0, 4.0], [1.0, 0.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0])
      [[0.   1.  ]
       [0.25 0.  ]]
    """

    # As in `Norm`, but no arguments.
    ord: float = dataclasses.field(init=False, repr=False)
    per_count: float = dataclasses.field(init=False, repr=False)
    method: Literal["exact", "power_iteration"] = "exact"
    steps: int = 1

    def __post_init__(self) -> None:
        _validate.choice("method", self.method, ("exact", "power_iteration"))
        _validate.length("steps", self.steps)

    @property
    def remembers(self) -> bool:
        """Whether it starts from what it found the step before."""
        return self.method == "power_iteration"


def spectral_norm(
    block: Block, dtype: DTypeLike, axis_name: AxisName | None
) -> jax.Array:
    """The largest singular value of each matrix, shaped as other norms are."""
    matrices = _matrices.matrices_of(block, dtype, axis_name)
    return as_norm_of(block, _matrices.singular_values(matrices)[..., -1:])


def as_norm_of(block: Block, found: jax.Array) -> jax.Array:
    """`(..., 1)` as the norm of a block: with the leaf's axes, or a scalar."""
    if block.axis is None:
        return found.reshape(())
    return jnp.expand_dims(found[..., 0], block.axis)


SPECTRAL: Spectral = Spectral()


_BY_NAME = {
    "spectral": SPECTRAL,
    "l1": L1,
    "l2": L2,
    "inf": INF,
    "rms": RMS,
    "average": AVERAGE,
}
NormLike = Norm | float | Literal["l1", "l2", "inf", "rms", "average", "spectral"]


def as_norm(norm: NormLike) -> Norm:
    """The norm that a `norm=` argument names, by name or by order."""
    if isinstance(norm, Norm):
        return norm
    if isinstance(norm, str) and norm in _BY_NAME:
        return _BY_NAME[norm]
    if isinstance(norm, (int, float, np.floating, np.integer)) and not isinstance(
        norm, bool
    ):
        return Norm(float(norm))
    names = ", ".join(map(repr, _BY_NAME))
    wanted = f"{names}, an order p or an optclip.norms.Norm"
    raise TypeError(_validate.must_be("norm", wanted, norm, _validate.static("norm")))
