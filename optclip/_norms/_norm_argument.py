"""Resolve a `norm=` argument: a name, an order, or a norm."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .._arrays import _validate
from ._norm import AVERAGE, INF, L1, L2, RMS, Measurement, Norm

NormName = Literal["l1", "l2", "inf", "rms", "average", "spectral"]
NormLike = Measurement | float | NormName

# The package `_spectral` registers its norm here, since this package may not import it.
BY_NAME: dict[str, Measurement] = {
    "l1": L1,
    "l2": L2,
    "inf": INF,
    "rms": RMS,
    "average": AVERAGE,
}


def as_norm(norm: NormLike) -> Measurement:
    """Return the norm of a `norm=` argument."""
    if isinstance(norm, Measurement):
        return norm
    if isinstance(norm, str) and norm in BY_NAME:
        return BY_NAME[norm]
    if isinstance(norm, (int, float, np.generic)) and _validate.is_number(norm):
        return Norm(norm)
    names = ", ".join(map(repr, BY_NAME))
    wanted = f"{names}, an order p, or a Norm or Spectral of optclip.norms"
    advice = _validate.static("norm", norm)
    raise TypeError(_validate.must_be("norm", wanted, norm, advice))
