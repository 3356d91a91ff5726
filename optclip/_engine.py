"""The engine: any threshold, scope, norm and response as an optax transformation.

The only place that builds `optax.GradientTransformationExtraArgs` and that keeps
state. Every `clip_by_*` is one call of `clip_by`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optclip import (
    _leaves,
    _memory,
    _of,
    _placement,
    _record,
    _validate,
    norms,
    scopes,
)
from optclip._clip import Clip, Reading
from optclip._elements import Limits, nearer
from optclip._opened import Opened
from optclip._record import ClipState
from optclip._rows import Rows
from optclip.responses._resolve import resolve
from optclip.thresholds import _rule
from optclip.typing import (
    AxisName,
    Mask,
    Nonfinite,
    Number,
    PyTree,
    Record,
    ResponseLike,
    ThresholdTree,
)


def clip_by(
    threshold: ThresholdTree,
    *,
    over: scopes.Scope = scopes.TREE,
    norm: norms.Norm = norms.L2,
    response: ResponseLike = "hard",
    of: Callable[[PyTree, PyTree, dict[str, Any]], PyTree] | None = None,
    eps: Number = 0.0,
    strict: bool = False,
    nonfinite: Nonfinite = "propagate",
    norm_mask: Mask | None = None,
    clip_mask: Mask | None = None,
    axis_name: AxisName | None = None,
    record: Record = True,
    name: str = "clip",
) -> optax.GradientTransformationExtraArgs:
    r"""Any clip there is: measure, threshold, respond, apply, record.

    .. math:: u \leftarrow u \cdot \mathrm{response}(\|u\|_{over}, threshold)

    Args:
      threshold: where to clip. A number or array of at least 0, traced or not (0 clips
        to zero, inf measures and touches nothing); an optax schedule (what it returns
        counts as traced: below 0 is 0, NaN stays NaN); a rule with
        `init(norm)` and `update(seen, memory)`; for leaf and group scope a prefix tree
        of these, None for unclipped; for `ELEMENT` also `thresholds.bounds(...)`.
      over: what shares a norm: `TREE`, `LEAF`, `ELEMENT`, `axes(...)`, `groups(...)`,
        or a scope of your own.
      norm: `norms.L2`, `L1`, `INF`, `RMS`, `AVERAGE` or `Norm(p)`.
      response: what happens at the threshold: a name such as `"hard"`, `"smooth"` or
        `"drop"` (`help(optclip.responses)` has them all), an object with
        `coefficient(norm, threshold)`, or a function of those two. It is asked inside
        the threshold too, and returns 1 there to touch nothing.
      of: what the norm is taken of, if not of the updates: a function `(updates,
        params, extra_args)`, which gets the extra keyword arguments of `update` as a
        dict and returns a tree of the structure and shapes of the updates.
      eps: a scalar, added to the norm before the response sees it; 1e-6 in PyTorch.
      strict: the true norm of the output is never above the threshold: clips inside a
        band of 2e-6 below it (1e-4 for unusual orders), then rounds towards zero in
        the dtype of each leaf. A threshold below 2**-30 counts as 0. The norm is that
        of what is measured; a response of your own is held to what it asks for, not to
        the threshold.
      nonfinite: `"propagate"`, `"zero"`, `"drop"` or `"raise"`: see
        `optclip.functional`.
      norm_mask: which leaves enter the norm: a tree of bools, a prefix of one, or a
        function tree -> tree.
      clip_mask: which leaves are scaled; likewise.
      axis_name: mapped axes that leaves are split over, which a norm spans: a name, a
        tuple of names (`()` for none), a `PartitionSpec`, a prefix tree of these or a
        function tree -> tree; None reads them off the type of each leaf, which
        `jax.shard_map` keeps.
      record: whether the state keeps what happened; `"leaves"` keeps it by leaf for
        leaf, axis and element scope; the tree has one norm only.
      name: what `optclip.metrics` calls this clip.

    Returns:
      A transformation; its state is a `ClipState` of fixed structure.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of range; or, at `init` and `update`, a tree of
        thresholds, masks, labels or axis names does not match the updates; a
        threshold varies over devices that share a norm; a leaf is not summed yet
        over a mesh axis.

    Example:
      Adaptive soft clipping of each layer's units, by hand:

      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.clip_by(1.0, over=optclip.axes(0), response="smooth")
      >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])
      >>> print(tx.update(kernel, tx.init(kernel))[0].round(2))
      [[0.59 0.  ]
       [0.78 0.71]]
    """
    clip = Clip(
        over, norm, resolve(response), eps, strict, nonfinite,
        norm_mask, clip_mask, axis_name,
    )  # fmt: skip
    rules = _rules(threshold, clip)
    _of.check(of, clip)
    _check_record(record, name, over)

    def init_fn(params: Any) -> ClipState:
        treedef, shapes = _norm_shapes(clip, params)
        zeros = jax.tree.unflatten(
            treedef, [_placement.zeros(s, params) for s in shapes]
        )
        return ClipState(
            clip_step=jnp.zeros((), jnp.int32),
            clip_memory=[_memory.init(k, r, zeros) for k, r in rules.items()],
            clip_record={name: _record.blank(treedef, over, record)} if record else {},
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ClipState]:
        opened = clip.open(
            updates if of is None else _of.tree(of, updates, params, extra_args)
        )
        _record.check_state(state, len(rules), opened.treedef, name, over, record)
        if jax.tree.leaves(state.clip_memory):
            clip.check_spans(opened)
        now = clip.at(state.clip_step)
        reading = now.measure(opened)
        seen = _rule.Seen(
            norm=opened.tree(reading.measured.entries()),
            finite=None,
            keep=now.keep,
            measure=lambda tree: _norm_tree(now, tree),
            params=params,
            step=state.clip_step,
            extra=extra_args,
        )
        bad = opened.tree(reading.bad.entries())
        values, memories = {}, []
        for (key, rule), memory in zip(rules.items(), state.clip_memory, strict=True):
            found, memory = _memory.update(key, rule, seen, memory, bad)
            values[key] = opened.entries(found)
            memories.append(memory)
        limits = _limits(now, opened, reading, values)
        scaled = opened if of is None else _of.matched(now.open(updates), opened)
        clipped, coefficients = now.apply(scaled, reading.measured, limits)
        records = {}
        if record:
            steps = _steps(opened, reading, limits, coefficients)
            old = state.clip_record[name]
            new = _record.advance(old, opened.treedef, over, record, steps)
            records = {name: new}
        step = jnp.asarray(optax.safe_increment(state.clip_step))
        return clipped, ClipState(step, memories, records)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _rules(threshold: Any, clip: Clip) -> dict[str, Any]:
    if isinstance(threshold, _rule.Named):
        name, given = threshold.name, threshold.value
        return {name: _rule.as_rules(name, given)}
    if not isinstance(threshold, _rule.Bounds):
        return {"threshold": _rule.as_rules("threshold", threshold)}
    if not clip.moves_elements:
        raise ValueError(
            "Two bounds are for single elements: give over=optclip.ELEMENT and"
            " response='hard' with thresholds.bounds(...), or one threshold."
        )
    return {"lower": threshold.lower, "upper": threshold.upper}


def _check_record(record: Any, name: Any, over: Any) -> None:
    words = isinstance(record, str) and record == "leaves"
    if not words and not isinstance(record, bool):
        raise TypeError(
            f"record={record!r} is not known. Give True, False or 'leaves'."
        )
    if words and over is scopes.TREE:
        raise ValueError(
            "record='leaves' asks for a norm a leaf; this clip has one for the tree."
            " Give record=True, or put clip_by_norm(inf, record='leaves', name='watch')"
            " before it, which measures each leaf and clips none."
        )
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} is not accepted. Give a non-empty string.")


def _norm_shapes(clip: Clip, params: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The structure of the norms of trees like `params`, nothing computed."""
    local = clip.at_init()
    flat = _leaves.flatten(params)
    live = flat.clippable()
    treedefs = []

    def measure(arrays: list[Any]) -> list[jax.Array]:
        given = iter(arrays)
        leaves = [
            next(given) if is_live else x
            for is_live, x in zip(live, flat.leaves, strict=True)
        ]
        opened = local.open(flat.rebuild(leaves))
        treedefs.append(opened.treedef)
        return _norms(local, opened)

    arrays = [x for is_live, x in zip(live, flat.leaves, strict=True) if is_live]
    shapes = jax.eval_shape(measure, arrays)
    return treedefs[-1], shapes


def _norm_tree(clip: Clip, tree: Any) -> Any:
    # A tree of its own structure: parameters may have leaves that updates have not.
    opened = clip.open(tree)
    return opened.tree(_norms(clip, opened))


def _norms(clip: Clip, opened: Opened) -> list[jax.Array]:
    return clip.measure(opened).measured.entries()


def _limits(
    clip: Clip,
    opened: Opened,
    reading: Reading,
    values: dict[str, list[Any]],
) -> Any:
    if len(values) == 2:
        return [Limits(lo, hi) for lo, hi in zip(*values.values(), strict=True)]
    ((name, found),) = values.items()
    if clip.moves_elements:
        for value, block in zip(found, opened.blocks, strict=True):
            _validate.broadcasts(name, jnp.shape(value), jnp.shape(block.leaves[0]))
    return clip.fit(name, found, reading.measured)


def _steps(opened: Opened, reading: Reading, limits: Any, coefficients: Any) -> Rows:
    measured, bad = reading.measured, reading.bad
    told = measured.with_entries([norms.told_across(b) for b in opened.blocks])
    if not isinstance(limits, Rows):
        # Bounds of elements are of any shape that fits the leaf; one is recorded.
        least = [jnp.min(nearer(limit), initial=jnp.inf) for limit in limits]
        limits = measured.with_entries(least)
        shapes = [norm.shape for norm in measured.entries()]
        spread = map(jnp.broadcast_to, coefficients, shapes)
        coefficients = measured.with_entries(list(spread))

    def step(norm: Any, limit: Any, k: jax.Array, bad: jax.Array, told: Any) -> Any:
        past = (k != 1) & (k == k) & (norm > 0) & (norm < jnp.inf)
        return _record.Step(norm, limit, k, past, bad, told)

    return measured.map(step, limits, coefficients, bad, told)
