"""What was clipped: an optimizer state in, a flat dict for any logger out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optclip._arrays import _leaves, _packed_state, _validate
from optclip.monitor import _cotangents
from optclip.typing import ClipRecord, ClipState, PyTree, SkipRecord


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """The records of all clips in an optimizer state, as one flat dict of scalars.

    Finds every clip however the state is nested: chain, masked, partition, MultiSteps,
    inject_hyperparams, wrapped optimizers. Works inside jit: return the dict from the
    training step, then log it.

    Args:
      opt_state: the state of any optax transformation, as Flax NNX has it too, in
        `optimizer.opt_state` or `nnx.state(optimizer)`; or one restored without a
        target, in plain dicts. Gradients of probes of `clip_cotangent` too, alone or
        in a tree with it, such as `{"optimizer": opt_state, "cell": seen}`.

    Returns:
      For a clip named `name` (by default `clip`; a second of the same name becomes
      `clip_2`), arrays of shape `()`:

      ==================== ===========================================================
      ``clip/norm``        float32, the norm before the clip
      ``clip/threshold``   float32, where it clipped
      ``clip/coefficient`` float32, what the updates were multiplied by; of the tree
                           and of groups, norm * coefficient is the norm after, if
                           both are numbers that float32 has
      ``clip/rate``        float32, the fraction of all steps so far that were clipped;
                           a norm zeroed or made NaN by `nonfinite=` is not counted,
                           and steps of a rule's warm-up are among all steps
      ``clip/nonfinite``   int32, the number of steps so far with a NaN or inf entry
                           in the norm
      ``clip/steps``       int32, the number of updates so far, one for all groups and
                           leaves; it stays 0 if the training loop drops the new state
      ``clip/fraction``    float32, leaf, axis and element scope only: the fraction of
                           norms that were past their threshold in the last step
      ==================== ===========================================================

      Of `skip` also int32 ``skip/skipped`` and ``skip/consecutive``: how many steps it
      left out, and how many of them without a break up to now; and if it looks at the
      loss, float32 ``skip/value`` and ``skip/value_threshold``. Its coefficient and
      rate are of the norm alone: a step left out for its loss counts in ``skipped``. A
      clip inside `skip` keeps the record of the last step that was taken:
      ``skip/norm`` has them all.

      For the gradient of a probe, named by its path, such as `cell` (`cotangent` if it
      has none), of all that it went through in one backward pass:

      ========================= ======================================================
      ``cell/largest_norm``     float32, the largest finite norm before the clip; NaN
                                if several clips shared a probe in parallel, as all
                                examples of a `jax.vmap` do
      ``cell/mean_coefficient`` float32, the mean of what was multiplied by
      ``cell/clipped``          int32, how many norms were clipped
      ``cell/fraction``         float32, the fraction of the norms that were clipped
      ``cell/nonfinite``        int32, how many norms had a NaN or inf entry
      ========================= ======================================================

      Mean and fraction are NaN if no backward pass went through the probe. One with an
      entry a step is summed up.

      Groups have one key a label, ``clip/norm/<label>``; `record="leaves"` one a leaf,
      ``clip/norm/<path>``, a second leaf of the same path ``<path>_2``; a clip of the
      whole tree then has float32 ``clip/leaf_norm/<path>`` beside its one norm. For
      leaf, axis and element scope otherwise norm is the largest, threshold and
      coefficient the smallest of all.

    Raises:
      ValueError: there is no optclip clip in the state and no probe, or only such as
        keep nothing.

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
      clip/rate 1.0
      clip/nonfinite 0
      clip/steps 1
    """
    states, probes = _states(opt_state), _cotangents.records_of(opt_state)
    if not states and not probes:
        advice = (
            "Give the whole state of the chain. A clip with record=False and a fixed"
            " threshold, and one of optax, keeps nothing: give the clip record=True."
        )
        wanted = (
            "an optimizer state with an optclip clip in it, or the gradient of a"
            " cotangent_probe"
        )
        raise ValueError(_validate.must_be("opt_state", wanted, opt_state, advice))
    numbers: dict[str, jax.Array] = {}
    clip_names = {name for state, _ in states for name in state.clip_record}
    clip_names |= {name for name, _ in probes}
    used_names: set[str] = set()
    for state, skipped in states:
        for name, record in state.clip_record.items():
            unique = _packed_state.unique(name, clip_names, used_names)
            used_names.add(unique)
            entries = _entries(unique, _as(ClipRecord, record), state.clip_step)
            keys = {key for key, _ in entries}
            for key, value in entries:
                # Two leaves may have one path: {"a/b": x, "a": {"b": y}}.
                numbers[_packed_state.unique(key, keys, numbers.keys())] = value
            if name in skipped:
                counts = _as(SkipRecord, skipped[name])._asdict()
                for field, value in counts.items():
                    if value is not None:
                        key = f"{unique}/{field.removeprefix('skip_')}"
                        numbers[key] = _bare(value)
    for name, record in probes:
        unique = _packed_state.unique(name, clip_names, used_names)
        used_names.add(unique)
        for key, value in _cotangents.entries_of(record).items():
            numbers[f"{unique}/{key}"] = value
    return numbers


# The last words of keys: of a clip, and of a skip.
_FIELDS = {
    "norm",
    "leaf_norm",
    "threshold",
    "coefficient",
    "fraction",
    "rate",
    "nonfinite",
    "steps",
}

_FIELDS |= {"skipped", "consecutive", "value", "value_threshold", *_cotangents.FIELDS}


def parts_in(keys: Iterable[str]) -> dict[str, list[str]]:
    """The names of the clips in a dict of metrics, each with its groups or leaves.

    A clip that has one norm has one part, the empty one.
    """
    parts: dict[str, list[str]] = {}
    for key in keys:
        words = str(key).split("/")
        # The first match is the field, since a leaf's path may have such a word too.
        at = next((i for i, w in enumerate(words) if i and w in _FIELDS), None)
        if at is not None and words[at] == "norm":
            parts.setdefault("/".join(words[:at]), []).append("/".join(words[at + 1 :]))
    return parts


def is_metric(key: str) -> bool:
    """Whether a key is one of those that `metrics` makes, ``clip/norm/encoder``."""
    return any(part in _FIELDS for part in str(key).split("/")[1:])


def percent(fraction: float) -> str:
    """In whole percent; 0% is none and 100% all, whatever is rounded."""
    rounded = f"{fraction:.0%}"
    if rounded == "0%" and fraction > 0:
        return "<1%"
    # Rates are float32, so that a rate of 1 may be stored as the number below 1.
    return ">99%" if rounded == "100%" and fraction < 1 - 1e-6 else rounded


def _states(opt_state: Any) -> list[tuple[ClipState, Mapping[str, Any]]]:
    """Every clip in a state, with what `skip` counted beside it."""
    states = []
    for state in jax.tree.leaves(opt_state, is_leaf=_is_ours):
        if _has(state, "skip_norm"):
            inner, norm, record = (
                _get(state, f) for f in ("skip_inner", "skip_norm", "skip_record")
            )
            states += [*_states(inner), (_as(ClipState, norm), record)]
        elif _is_ours(state):
            states.append((_as(ClipState, state), {}))
    return states


def _is_ours(state: Any) -> bool:
    return _has(state, "clip_record") or _has(state, "skip_norm")


def _has(state: Any, field: str) -> bool:
    # States are dicts in nnx.state(optimizer), and when restored without a target.
    return field in state if isinstance(state, Mapping) else hasattr(state, field)


def _get(state: Any, field: str) -> Any:
    return state[field] if isinstance(state, Mapping) else getattr(state, field)


def _as(kind: Any, state: Any) -> Any:
    """A state or record as it is, or of a dict, which may leave out what is None."""
    if not isinstance(state, Mapping):
        return state
    return kind(*(state.get(field) for field in kind._fields))


def _bare(value: Any) -> Any:
    """A number without the box that Flax NNX has it in."""
    return jax.tree.leaves(value)[0]


def _entries(
    name: str, record: ClipRecord, step: jax.Array
) -> list[tuple[str, jax.Array]]:
    steps = jnp.maximum(_bare(step), 1).astype(jnp.float32)
    fields = {
        "norm": record.clip_norm,
        "threshold": record.clip_threshold,
        "coefficient": record.clip_coefficient,
        "rate": jax.tree.map(
            lambda n: n.astype(jnp.float32) / steps, record.clip_clipped
        ),
        "nonfinite": record.clip_nonfinite,
        "fraction": record.clip_fraction,
        "leaf_norm": record.clip_leaf_norm,
    }
    pairs = []
    for field, tree in fields.items():
        entries = jax.tree.leaves_with_path(tree)
        parts = _leaves.names_of([path for path, _ in entries])
        for part, (_, value) in zip(parts, entries, strict=True):
            pairs.append(("/".join(filter(None, (name, field, part))), value))
    return [*pairs, (f"{name}/steps", _bare(step))]
