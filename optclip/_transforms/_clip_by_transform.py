"""Clip by any threshold, scope, norm and response, as an optax transformation.

Each `clip_by_*` transformation is one call of `clip_by`, which adds the learning of
thresholds, the state and the record.
"""

from __future__ import annotations

import optax

from .._clip import clip_of
from .._norms import NormLike, as_norm
from .._responses import resolve
from .._scopes import ScopeLike, as_scope
from .._typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    Record,
    ResponseLike,
    ThresholdTree,
)
from ._engine import Engine, clipping
from ._positions import checks_positions
from ._rules import rules_of


@checks_positions()
def clip_by(
    threshold: ThresholdTree,
    *,
    over: ScopeLike = "tree",
    norm: NormLike = "l2",
    response: ResponseLike = "hard",
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    mask: Mask | None = None,
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    """Build a clipping transformation from its parts.

    Each norm `n` of the updates is compared with its threshold `c`, and the elements
    that share the norm are multiplied by `response(n, c)`. The other transformations
    call this one; shared options are explained in full here.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.axes(0), response="smooth")
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0].round(2))
      [[0.59 0.  ]
       [0.78 0.71]]

    Args:
      threshold: Where to clip: a number or array of at least 0, an optax schedule, a
        rule of `optclip.thresholds`, or your own object with `init(norm)` and
        `update(seen, memory)`. For scopes of leaves and groups also a prefix tree of
        these, in which None means unclipped. 0 clips to zero; inf measures and clips
        nothing. A traced negative threshold counts as 0.
      over: Which elements share a norm: `"tree"` (default), `"leaf"`, `"element"`,
        `axes(...)`, `units(...)`, `groups(...)`, or another scope of `optclip.scopes`.
      norm: `"l2"` (default), `"l1"`, `"inf"`, `"rms"`, `"average"`, an order p above 0,
        or an `optclip.norms.Norm`.
      response: What happens above the threshold. A name: `"hard"` (default) scales to
        the threshold, `"smooth"`, `"normalize"`, `"drop"` and others are in
        `optclip.responses`. Or an object with `coefficient(norm, threshold)`, or a
        function of these two, which is also called below the threshold; return 1 there
        to keep updates unchanged.
      eps: Number of at least 0 added to each norm before the division, for elements to
        their modulus. Default: 0. PyTorch uses 1e-6.
      strict: Whether the norm after rounding never exceeds the threshold. It then clips
        to `threshold * (1 - 1.3e-4)` and rounds toward zero in the dtype of each leaf.
        A threshold below 2**-36 (2**-450 for float64) counts as 0. Orders below 0.5 are
        not covered.
      nonfinite: What NaN and inf do. `"propagate"` (default) makes all elements that
        share the norm NaN, `"zero"` makes them zero, and `"raise"` raises an error
        under `jax.experimental.checkify`. For single elements `"propagate"` keeps
        NaN, and inf moves to its bound if `response` is `"hard"`, `"normalize"` or
        `"proportional"` and `eps` is 0.
      mask: Leaves to clip; other leaves are neither measured nor scaled. A tree of
        bools, a prefix of one, or a function of the updates that returns one, such as
        `optclip.by_path(lambda path: "embed" not in path)`. Default: all.
      norm_mask: Leaves that enter the norm, in the same forms. Default: `mask`.
      clip_mask: Leaves that are scaled, in the same forms. Default: `mask`.
      axis_name: Mapped axes that split the leaves, which norms then span: a name, a
        tuple of names (`()` for none), a `PartitionSpec`, a prefix tree of these, or a
        function of the updates. Default: read from the type of each leaf, which
        `jax.shard_map` sets.
      record: Whether the state records each step for `optclip.metrics`. `"leaves"`
        records one entry per norm, and for the tree also the norm of each leaf.
      name: Key prefix in `optclip.metrics`.

    Returns:
      An optax transformation with a `ClipState` of fixed structure. With `record=False`
      and a fixed threshold the state is `optax.EmptyState()`, as in optax, and `update`
      accepts and returns any state.

    Raises:
      ValueError: An argument is out of range, such as a negative or NaN threshold; a
        leaf lacks an axis; a tree of thresholds, masks, labels or axis names does not
        match the updates; a threshold differs between devices that share a norm; or a
        leaf is unreduced over a mesh axis.

    Guarantees:
      Unclipped leaves are bit-identical. With the hard response the norm of clipped
      leaves is at most `threshold * (1 + 2e-5)`, and `(1 + 2e-4)` for orders other than
      2 and inf, before the cast to the dtype of each leaf.
    """
    clip = clip_of(
        as_scope(over), as_norm(norm), resolve(response), eps=eps, strict=strict,
        nonfinite=nonfinite, mask=mask, norm_mask=norm_mask, clip_mask=clip_mask,
        axis_name=axis_name,
    )  # fmt: skip
    engine = Engine(clip, rules_of(threshold, clip), record, name)
    return clipping(engine, engine.decide)
