"""Clipping as optax transformations, with their state and record."""

from optclip.transforms._clip_by_transform import clip_by as clip_by
from optclip.transforms._leaf_norm_transforms import (
    clip_by_average_norm as clip_by_average_norm,
)
from optclip.transforms._leaf_norm_transforms import clip_by_norm as clip_by_norm
from optclip.transforms._leaf_norm_transforms import clip_by_rms as clip_by_rms
from optclip.transforms._tree_norm_transforms import (
    clip_by_global_norm as clip_by_global_norm,
)
from optclip.transforms._tree_norm_transforms import (
    clip_by_group_norm as clip_by_group_norm,
)
from optclip.transforms._value_transform import clip_by_value as clip_by_value
