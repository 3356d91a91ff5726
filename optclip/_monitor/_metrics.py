"""Read clipping metrics from an optimizer state, as a flat dict for any logger."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax.contrib
from jax.core import Tracer

from .._arrays import _leaves, _packed_state, _placement, _validate, _xla
from .._typing import (
    ClipAfterState,
    ClipRecord,
    ClipState,
    ConstrainState,
    CotangentRecord,
    ErrorFeedbackState,
    PeriodicResetState,
    PyTree,
    SkipRecord,
    is_cotangent_record,
)

# The fields of a probe.
PROBE_FIELDS = ("largest_norm", "mean_coefficient", "clipped", "fraction", "nonfinite")

# The fields of metrics except `loss`, which trainers log under the same name.
FIELDS = {
    "norm",
    "leaf_norm",
    "threshold",
    "coefficient",
    "fraction",
    "rate",
    "nonfinite",
    "steps",
    "skipped",
    "consecutive",
    "loss_threshold",
    *PROBE_FIELDS,
}


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Read clipping metrics from an optimizer state into a flat dict of scalars.

    Finds all clipping transformations in a nested state (`chain`, `masked`,
    `partition`, `MultiSteps`, `inject_hyperparams`, wrapped optimizers). Works inside
    `jax.jit`: return the dict from the training step, then log it.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.adam(1e-3))
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)
      >>> for key, value in optclip.metrics(state).items():
      ...     print(key, value)
      clip/norm 5.0
      clip/threshold 1.0
      clip/coefficient 0.2
      clip/clipped 1
      clip/rate 1.0
      clip/nonfinite 0
      clip/steps 1

    Args:
      opt_state: State of any optax transformation; `optimizer.opt_state` or
        `nnx.state(optimizer)` of Flax NNX; or plain dicts restored without a target,
        where only a `name` of its own identifies each transformation in the state of
        another library.
        May be or contain gradients of `cotangent_probe`, as in
        `{"optimizer": opt_state, "cell": probe_grads}`.

    Returns:
      A dict of arrays of shape `()`. For a transformation with `name="clip"`, the
      default (a second one of the same name becomes `clip_2`):

      ==================== ===========================================================
      ``clip/norm``        float32, norm before clipping
      ``clip/threshold``   float32, threshold
      ``clip/coefficient`` float32, factor applied to the updates
      ``clip/clipped``     int32, steps so far that were clipped
      ``clip/rate``        float32, fraction of all steps so far that were clipped
      ``clip/nonfinite``   int32, steps so far with a non-finite norm
      ``clip/steps``       int32, updates so far
      ``clip/fraction``    float32, fraction of the norms clipped in the last step; for
                           leaves, axes and elements only
      ==================== ===========================================================

      Groups have one key per label, ``clip/norm/<label>``. With `record="leaves"`
      leaves, axes and elements have one key per leaf, ``clip/norm/<path>``, and
      global-norm clipping adds ``clip/leaf_norm/<path>``. Otherwise one of several
      norms is recorded, with its threshold and coefficient: the norm with the largest
      ratio to its threshold. Under a rule that reads norms, those below 1e-6 of the
      largest one, such as the rounding errors of a key bias, are not chosen. An entry
      for several norms has derivative 0.

      `skip` adds int32 ``skip/skipped`` and ``skip/consecutive``, the steps skipped so
      far and in a row, and with `max_loss` float32 ``skip/loss`` and
      ``skip/loss_threshold``. ``skip/rate`` is the fraction of all steps so far that
      were skipped; the other keys cover only the norm, not the loss. Transformations
      inside `skip` record only the steps taken.

      The gradient of a probe, named by its path (`cotangent` if that is empty), adds
      for all norms of one backward pass:

      ========================= ======================================================
      ``cell/largest_norm``     float32, largest finite norm before clipping; NaN if one
                                probe was used in parallel, as under `jax.vmap`
      ``cell/mean_coefficient`` float32, mean coefficient; NaN without norms
      ``cell/clipped``          int32, number of norms clipped
      ``cell/fraction``         float32, fraction of norms clipped; NaN without norms
      ``cell/nonfinite``        int32, number of non-finite norms
      ========================= ======================================================

      A probe gradient with one entry per step is summed over the steps.

    Raises:
      ValueError: There is neither a record of optclip nor a probe gradient.

    Guarantees:
      Norm times coefficient is the norm after clipping, within the range of float32.
      Norms that `nonfinite` zeroed or made NaN do not count as clipped. ``clip/steps``
      stays 0 if the training loop drops the new state.
    """
    states = states_in(opt_state)
    probes = [
        (_leaves.path_str(path) or "cotangent", x)
        for path, x in jax.tree.leaves_with_path(opt_state, is_leaf=is_cotangent_record)
        if is_cotangent_record(x)
    ]
    advice = (
        "Pass the whole state of the chain, with a clipping transformation that was"
        " built with record=True. Transformations of optax and wrappers such as"
        " with_periodic_reset record nothing themselves."
    )
    wanted = (
        "an optimizer state with a record of optclip, or the gradient of a"
        " cotangent_probe"
    )
    _validate.require("opt_state", opt_state, bool(states or probes), wanted, advice)
    return {
        key: number
        for metric in metrics_of(states, probes)
        for key, number in zip(metric.keys, metric.numbers(), strict=True)
    }


class Metric(NamedTuple):
    """Hold one number of a record, or one per layer of a stack.

    Attributes:
      key: The key in `metrics`, which for layers is followed by their position.
      field: The quantity, such as `"norm"`.
      value: The number, or an array whose last axis counts layers.
      skips: Names of the `skip`s around the transformation. In a skipped step the
        number is of the step before, unless it is a count.
      is_layers: Whether there is one number per layer.
    """

    key: str
    field: str
    value: jax.Array
    skips: tuple[str, ...] = ()
    is_layers: bool = False

    @property
    def keys(self) -> list[str]:
        """Return the key of each number in `metrics`."""
        if not self.is_layers:
            return [self.key]
        return [f"{self.key}/{i}" for i in range(jnp.shape(self.value)[-1])]

    def numbers(self) -> Sequence[jax.Array]:
        """Return the numbers."""
        if not self.is_layers:
            return [self.value]
        if not isinstance(self.value, Tracer) and jnp.ndim(self.value) == 1:
            return _xla.numbers(jnp.asarray(self.value))
        return jnp.unstack(self.value, axis=-1)


def metrics_of(
    states: list[Recorded], probes: Iterable[tuple[str, Any]] = ()
) -> list[Metric]:
    """Return the numbers of clipping states and of probe gradients, with their keys."""
    probes = list(probes)
    names = iter(_packed_state.numbered([*names_in(states), *(x for x, _ in probes)]))
    unique_names = [
        {key: next(names) for key in each.state.clip_record} for each in states
    ]
    metrics: dict[str, Metric] = {}
    for each, names_of_state in zip(states, unique_names, strict=True):
        skips = tuple(x for i in each.skips for x in unique_names[i].values())
        for record_key, name in names_of_state.items():
            numbers = _numbers(each, record_key)
            keys = {"/".join(filter(None, (name, *place))) for place in numbers}
            for (field, part), (value, is_layers) in numbers.items():
                key = "/".join(filter(None, (name, field, part)))
                # Two leaves may have the same path: {"a/b": x, "a": {"b": y}}.
                key = _packed_state.unique(key, keys, metrics.keys())
                metrics[key] = Metric(key, field, value, skips, is_layers)
    for (_, record), name in zip(probes, names, strict=True):
        for field, value in _entries_of(record).items():
            key = f"{name}/{field}"
            metrics[key] = Metric(key, field, value)
    return list(metrics.values())


def names_in(states: list[Recorded]) -> list[str]:
    """Return the name of each record; several may have one name."""
    return [_packed_state.as_name(x) for each in states for x in each.state.clip_record]


# States that hold several transformations, or one and other arrays.
_WITH_FIELDS = (
    ClipAfterState,
    ConstrainState,
    ErrorFeedbackState,
    PeriodicResetState,
    optax.contrib.SAMState,
)


class Recorded(NamedTuple):
    """Hold a clipping state.

    Attributes:
      state: The state.
      counts: The records of `skip` by key; empty for other transformations.
      skips: The indices, in the list of states, of the `skip`s around it.
    """

    state: ClipState
    counts: Mapping[str, Any]
    skips: tuple[int, ...]


def states_in(opt_state: Any) -> list[Recorded]:
    """Return the clipping states in a state, those inside a `skip` before it."""
    if has_field(opt_state, "skip_norm"):
        inner, norm, record = (
            read_field(opt_state, f) for f in ("skip_inner", "skip_norm", "skip_record")
        )
        states = states_in(inner)
        inside = [each._replace(skips=(*each.skips, len(states))) for each in states]
        return [*inside, Recorded(*_unboxed(as_kind(ClipState, norm), record), ())]
    if has_field(opt_state, "clip_record"):
        return [Recorded(*_unboxed(as_kind(ClipState, opt_state), {}), ())]
    states: list[Recorded] = []
    for child in _children(opt_state):
        before = len(states)
        states += [
            each._replace(skips=tuple(i + before for i in each.skips))
            for each in states_in(child)
        ]
    return states


def _unboxed(state: Any, counts: Any) -> tuple[Any, Any]:
    """Return a clipping state and the counts of `skip` without boxes.

    Orbax restores a box of Flax NNX without a target as `{"value": array}`.
    """
    if not isinstance(state.clip_step, Mapping):
        return state, counts

    def is_box(x: Any) -> bool:
        return isinstance(x, Mapping) and not isinstance(x.get("value", x), Mapping)

    return jax.tree.map(
        lambda x: x["value"] if is_box(x) else x, (state, counts), is_leaf=is_box
    )


def _children(node: Any) -> list[Any]:
    """Return the children of a node of a state, in order."""
    if isinstance(node, Mapping) and (keys := _in_order(list(node))):
        return [node[key] for key in keys]
    children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return [child for child in children if child is not node]


def _in_order(keys: list[Any]) -> list[Any]:
    """Return the keys in the order of the state that they are from; [] if unknown.

    JAX sorts keys as text, which exchanges the transformations of a state that was
    restored without a target.
    """
    if all(str(key).isdecimal() for key in keys):
        return sorted(keys, key=int)
    for kind in _WITH_FIELDS:
        if set(keys) <= set(kind._fields):
            return sorted(keys, key=kind._fields.index)
    return []


def has_field(state: Any, field: str) -> bool:
    # States are dicts in nnx.state(optimizer) and when restored without a target.
    if isinstance(state, Mapping):
        return field in state
    # Other nodes of a train state may return None for any attribute, so that only the
    # fields of named tuples are read.
    is_tuple = isinstance(state, tuple)
    return is_tuple and field in inspect.getattr_static(type(state), "_fields", ())


def read_field(state: Any, field: str) -> Any:
    return state[field] if isinstance(state, Mapping) else getattr(state, field)


def as_kind(kind: Any, state: Any) -> Any:
    """Return a state or record; a dict of it may lack the fields that are None."""
    if not isinstance(state, Mapping):
        return state
    return kind(*(state.get(field) for field in kind._fields))


def _bare(value: Any) -> Any:
    """Return a number without the box in which Flax NNX stores it."""
    return jax.tree.leaves(value)[0]


def _numbers(
    recorded: Recorded, key: str
) -> dict[tuple[str, str], tuple[jax.Array, bool]]:
    """Return the numbers of a record, and which are of layers, by field and part."""
    state = recorded.state
    step, record = _placement.on_device((state.clip_step, state.clip_record[key]))
    record = as_kind(ClipRecord, record)
    fields = {
        "norm": record.clip_norm,
        "threshold": record.clip_threshold,
        "coefficient": record.clip_coefficient,
        "clipped": record.clip_clipped,
        "rate": jax.tree.map(lambda n: _rate(n, step), record.clip_clipped),
        "nonfinite": record.clip_nonfinite,
        "fraction": record.clip_fraction,
        "leaf_norm": record.clip_leaf_norm,
        "steps": step,
    }
    numbers = {}
    for field, tree in fields.items():
        entries = jax.tree.leaves_with_path(tree)
        keys = _leaves.names_of([path for path, _ in entries])
        for record_path, (_, value) in zip(keys, entries, strict=True):
            # Keys of a record have no slash, so one precedes `_packed_state.LAYERS`.
            part, *layers = record_path.split("/")
            part = "" if field == "steps" else _packed_state.as_name(part)
            numbers[field, part] = value, bool(layers)
    if key in recorded.counts:
        counts = as_kind(SkipRecord, _placement.on_device(recorded.counts[key]))
        numbers["rate", ""] = _rate(counts.skip_skipped, step), False
        for field, value in counts._asdict().items():
            if value is not None:
                numbers[field.removeprefix("skip_"), ""] = _bare(value), False
    return numbers


def _rate(count: Any, step: jax.Array) -> jax.Array:
    steps = jnp.maximum(_bare(step), 1).astype(jnp.float32)
    counts = _bare(count).astype(jnp.float32)
    # Of a stack, one count per layer shares the number of steps.
    return counts / jnp.expand_dims(steps, range(steps.ndim, counts.ndim))


def _entries_of(record: CotangentRecord) -> dict[str, jax.Array]:
    """Return the metrics of one record, summed over its steps if it has several."""
    number = jnp.sum(record.cotangent_norms)
    largest = jnp.max(record.cotangent_norm, initial=0)
    # Adding the records of parallel chains also added their largest norms, so the
    # metric is NaN. It is computed, since a NaN constant would trip jax.debug_nans.
    is_known = jnp.all(record.cotangent_chains <= 1).astype(jnp.float32)
    clipped = jnp.sum(record.cotangent_clipped)
    return {
        "largest_norm": largest * (is_known / is_known),
        "mean_coefficient": jnp.sum(record.cotangent_coefficients) / number,
        "clipped": clipped.astype(jnp.int32),
        "fraction": clipped / number,
        "nonfinite": jnp.sum(record.cotangent_nonfinite).astype(jnp.int32),
    }
