"""Clip cotangents inside the backward pass; the forward pass is unchanged.

Public names: `optclip.clip_cotangent`, `optclip.with_clipped_cotangent` and
`optclip.cotangent_probe`.
"""

from optclip.cotangents._clip_cotangent import clip_cotangent as clip_cotangent
from optclip.cotangents._layer_decorator import (
    with_clipped_cotangent as with_clipped_cotangent,
)
from optclip.cotangents._probe import cotangent_probe as cotangent_probe

__all__ = ["clip_cotangent", "cotangent_probe", "with_clipped_cotangent"]
