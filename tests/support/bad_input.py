"""The table of bad input: for each parameter, values that are refused, and the words.

`CALLS` says how each public callable is called rightly; a row is one such call with
one argument replaced. The texts hold `{p}` where the parameter is named.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import optclip
from optclip import (
    functional,
    norms,
    per_example,
    plot,
    recipes,
    responses,
    scopes,
    thresholds,
)

TREE = {"a": jnp.array([3.0, 4.0]), "b": [jnp.ones((2, 3))]}
LABELS = {"a": "x", "b": "y"}
HUGE = 10**400


@dataclasses.dataclass(frozen=True)
class Bad:
    """A value, the error, and what its text says was given, is accepted, is to do.

    Attributes:
      of_each: whether each callable refuses it by a bound of its own, so that every one
        is asked; what a check refuses that many share, a few of them are asked.
    """

    value: Any
    error: type[Exception]
    given: str
    accepted: str
    remedy: str = r"\bmust be\b|\b[Gg]ive\b"
    of_each: bool = False


def clips(tx: Any) -> Any:
    """Some things can only be seen once there is a tree."""
    return tx.update(TREE, tx.init(TREE), TREE)


@dataclasses.dataclass(frozen=True)
class Call:
    """A public callable, arguments that it accepts, and what is done with the result."""

    function: Callable[..., Any]
    right: dict[str, Any]
    then: Callable[[Any], Any] = lambda result: result

    def run(self, **wrong: Any) -> Any:
        return self.then(self.function(**(self.right | wrong)))


def _clips_over(scope: Any) -> Any:
    return clips(optclip.clip_by(1.0, over=scope))


def _clips_by(response: Any) -> Any:
    return clips(optclip.clip_by(1.0, response=response))


def _clips_at(rule: Any) -> Any:
    return clips(optclip.clip_by_norm(rule))


def _clips_elements_at(rule: Any) -> Any:
    return clips(optclip.clip_by_value(rule))


def _clips_over_matrices(scope: Any) -> Any:
    return clips(optclip.clip_by(1.0, over=scope, norm="spectral"))


ADAM, CLIP = optax.scale_by_adam(), optclip.clip_by_value(1.0)
CALLS = {
    "by_path": Call(optclip.by_path, {"function": str}),
    "clip_by": Call(optclip.clip_by, {"threshold": 1.0}, clips),
    "axes": Call(optclip.axes, {"axis": 0}, _clips_over),
    "groups": Call(optclip.groups, {"labels": LABELS}, _clips_over),
    "metrics": Call(
        optclip.metrics, {"opt_state": optclip.clip_by_norm(1.0).init(TREE)}
    ),
    "Norm": Call(norms.Norm, {}),
    "Block": Call(norms.Block, {"leaves": [TREE["a"]]}, lambda b: norms.measure([b])),
    "measure": Call(norms.measure, {"blocks": [norms.Block([TREE["a"]])]}),
    "units": Call(optclip.units, {}, _clips_over),
    "matrices": Call(optclip.matrices, {}, _clips_over_matrices),
    "singular_values": Call(optclip.singular_values, {}, _clips_over),
    "Spectral": Call(norms.Spectral, {}),
    "Band": Call(responses.Band, {"low": 0.5}, _clips_by),
    "band": Call(responses.band, {}, _clips_by),
    "Smooth": Call(responses.Smooth, {}),
    "Detached": Call(responses.Detached, {"response": "hard"}, _clips_by),
    "detached": Call(responses.detached, {}, _clips_by),
    "Bounds": Call(
        thresholds.Bounds,
        {"lower": -1.0, "upper": 1.0},
        lambda b: clips(optclip.clip_by(b, over="element")),
    ),
    "bounds": Call(
        thresholds.bounds,
        {"lower": -1.0, "upper": 1.0},
        lambda b: clips(optclip.clip_by(b, over="element")),
    ),
    "constant": Call(thresholds.constant, {"value": 1.0}),
    "schedule": Call(thresholds.schedule, {"function": lambda step: 1.0}),
    "previous_norm": Call(thresholds.previous_norm, {}),
    "relative_to_params": Call(thresholds.relative_to_params, {}),
    "quantile": Call(thresholds.quantile, {}, _clips_at),
    "mean_plus_std": Call(thresholds.mean_plus_std, {}, _clips_at),
    "ema": Call(thresholds.ema, {}, _clips_at),
    "zscore": Call(thresholds.zscore, {}, _clips_at),
    "ema_of_max": Call(thresholds.ema_of_max, {}, _clips_elements_at),
    "mean_over_rms": Call(thresholds.mean_over_rms, {}, _clips_at),
    "moment": Call(thresholds.moment, {}, _clips_elements_at),
    "second_moment": Call(thresholds.second_moment, {}, _clips_elements_at),
    "of_gradients": Call(thresholds.of_gradients, {"rule": thresholds.moment()}),
    "clip_after": Call(optclip.clip_after, {"inner": ADAM, "clip": CLIP}, clips),
    "skip": Call(optclip.skip, {"inner": ADAM}, clips),
    "with_error_feedback": Call(optclip.with_error_feedback, {"clip": CLIP}, clips),
    "with_periodic_reset": Call(optclip.with_periodic_reset, {"inner": ADAM}, clips),
    "suggest": Call(optclip.suggest, {"norms": np.arange(100.0)}),
    "summary": Call(
        optclip.summary, {"opt_state": optclip.clip_by_norm(1.0).init(TREE)}
    ),
    "functional.clip_by": Call(functional.clip_by, {"tree": TREE, "threshold": 1.0}),
    "functional.global_norm": Call(functional.global_norm, {"tree": TREE}),
}
_PROJECTIONS = {"query": jnp.ones((3, 4, 2)), "key": jnp.ones((3, 2, 2))}
_LAYERS = {"attn": optclip.Heads("query", "key")}
_LOGITS = {"attn": jnp.full(4, 200.0)}


def _clips_logits(tx: Any) -> Any:
    state = tx.init(_PROJECTIONS)
    return tx.update(_PROJECTIONS, state, _PROJECTIONS, max_logits=_LOGITS)


def _clips_with(heads: Any) -> Any:
    layers = {"attn": heads}
    return functional.clip_attention_logits(_PROJECTIONS, _LOGITS, 1.0, layers)


CALLS |= {
    "Heads": Call(optclip.Heads, {"query": "query", "key": "key"}, _clips_with),
    "find_heads": Call(
        optclip.find_heads,
        {"params": _PROJECTIONS, "query": "query", "key": "key"},
        lambda found: _clips_with(found["attention"]),
    ),
    "clip_attention_logits": Call(
        optclip.clip_attention_logits,
        {"max_logit": 100.0, "layers": _LAYERS},
        _clips_logits,
    ),
    "functional.clip_attention_logits": Call(
        functional.clip_attention_logits,
        {
            "params": _PROJECTIONS,
            "max_logits": _LOGITS,
            "max_logit": 100.0,
            "layers": _LAYERS,
        },
    ),
    "functional.max_attention_logit": Call(
        functional.max_attention_logit, {**_PROJECTIONS}
    ),
}


def _loss_of_one(params: Any, example: Any) -> Any:
    return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * example


def _derived(function: Any) -> Any:
    return function(TREE, jnp.ones(3))


CALLS |= {
    "clip_cotangent": Call(optclip.clip_cotangent, {"tree": TREE, "max_norm": 1.0}),
    "cotangent_probe": Call(optclip.cotangent_probe, {}),
    "with_clipped_cotangent": Call(
        optclip.with_clipped_cotangent,
        {"block": lambda tree: tree, "max_norm": 1.0},
        lambda block: block(TREE),
    ),
}
_OF_EXAMPLES = jax.tree.map(lambda x: jnp.stack([x, x]), TREE)
CALLS |= {
    "per_example.clipped_grad": Call(
        per_example.clipped_grad, {"loss": _loss_of_one, "threshold": 1.0}, _derived
    ),
    "per_example.norms": Call(per_example.norms, {"loss": _loss_of_one}, _derived),
    "per_example.clipped_sum": Call(
        per_example.clipped_sum, {"grads": _OF_EXAMPLES, "threshold": 1.0}
    ),
    "per_example.aggregate": Call(
        per_example.aggregate,
        {"threshold": 1.0, "normalize_by": 2.0},
        lambda tx: tx.update(_OF_EXAMPLES, tx.init(TREE)),
    ),
    "per_example.QuantileThreshold": Call(per_example.QuantileThreshold, {}),
}
_HISTORY = {
    f"clip/{field}/{part}": np.ones(3)
    for field in ("norm", "threshold", "coefficient")
    for part in ("a", "b")
}


def _closed(ax: Any) -> None:
    plt.close(ax.figure)


for _name in ("norms", "rate", "distribution"):
    CALLS[f"plot.{_name}"] = Call(
        getattr(plot, _name), {"history": _HISTORY, "part": "a"}, _closed
    )
CALLS["plot.heatmap"] = Call(plot.heatmap, {"history": _HISTORY}, _closed)
CALLS["plot.runs"] = Call(
    plot.runs, {"histories": {"one": _HISTORY}, "part": "a"}, _closed
)
CALLS["plot.save"] = Call(plot.save, {"history": _HISTORY, "path": os.devnull})
for _name in recipes.__all__:
    _right = {"use_value": False} if _name == "olmo_skip" else {}
    CALLS[f"recipes.{_name}"] = Call(getattr(recipes, _name), _right, clips)
for _name, _right in {
    "clip_by_value": {"lower": -1.0, "upper": 1.0},
    "clip_by_norm": {"max_norm": 1.0},
    "clip_by_average_norm": {"max_norm": 1.0},
    "clip_by_rms": {"max_rms": 1.0},
    "clip_by_group_norm": {"max_norm": 1.0, "groups": LABELS},
    "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_spectral_norm": {"max_norm": 1.0},
    "clip_by_singular_value": {"max_value": 1.0},
}.items():
    CALLS[_name] = Call(getattr(optclip, _name), _right, clips)
    CALLS[f"functional.{_name}"] = Call(
        getattr(functional, _name), _right | {"tree": TREE}
    )
T, V = TypeError, ValueError
_NUMBER = "[Nn]umber"
_PREFIX = (
    "`{p}` must be a prefix of the structure .*, got",
    "[Oo]ne value, or a tree|give one number",
)
_REAL = "`{p}` must be a (real )?number"
_GIVEN = "`{p}` must be .*, got "
BOUND = [
    Bad("x", T, rf"{_GIVEN}'x' \(str\)", _REAL),
    Bad(1j, T, rf"{_GIVEN}1j \(complex\)", _REAL),
    Bad(True, T, rf"{_GIVEN}True \(bool\)", _REAL),
    Bad({"a": 1.0, "b": "x"}, T, rf"{_GIVEN}'x' \(str\)", _REAL),
    Bad(math.nan, V, rf"{_GIVEN}nan \(float\)", "not NaN"),
    Bad(jnp.array([1.0, jnp.nan]), V, rf"{_GIVEN}Array\(\[ *1\., *nan", "not NaN"),
    Bad(HUGE, V, f"{_GIVEN}an int beyond", "in the range of floats, or inf"),
    Bad(jax.random.key(0), T, "`{p}` must be .*PRNGKeyArray", _REAL),
    Bad(np.ones((7, 7)), V, r"`{p}` of shape \(7, 7\)", "a number, (or )?an array"),
    Bad([], V, *_PREFIX),
    Bad({"a": 1.0, "z": 1.0, "b": 1.0}, V, *_PREFIX),
]
_POSITIVE = "`{p}` must be 0 or more and not NaN"
_AT_ZERO = "0 clips to zero"
THRESHOLD = [
    *BOUND,
    Bad(None, T, rf"{_GIVEN}None \(NoneType\)", "must be a number .*inf"),
    Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", _POSITIVE, _AT_ZERO),
    Bad(np.array([-1.0]), V, rf"{_GIVEN}array\(\[-1\.\]\)", _POSITIVE, _AT_ZERO),
    Bad(jnp.float32(-3), V, rf"{_GIVEN}Array\(-3", _POSITIVE, _AT_ZERO),
]
_RETURNED = "The function given as `{p}` must return .*, got "
MASK = [
    Bad("x", T, r"`{p}` for the leaf 'a' must .* got 'x' \(str\)", "be True or False"),
    Bad(1, T, r"`{p}` for .* got 1 \(int\)", "be True or False"),
    Bad(math.nan, T, r"`{p}` for .* got nan \(float\)", "be True or False"),
    Bad(jnp.array(True), T, r"`{p}` for .* got .*Array\(True", "static_args=.'{p}'"),
    Bad({"a": True}, V, _PREFIX[0] + ".*lacks 'b/0'", _PREFIX[1]),
    Bad([], V, *_PREFIX),
    Bad(lambda tree: None, T, _RETURNED + "None", "a tree like the one", "Wrap"),
    Bad(lambda path: True, T, _RETURNED + "True", "a tree", "Wrap"),
]
_A_LABEL = "A label in `groups` must be a string"
LABEL = [
    Bad(None, T, r"`groups` must .* got None \(NoneType\)", "be a tree of strings"),
    Bad(3, T, r"got 3 \(int\)", _A_LABEL),
    Bad({"a": 1.0, "b": "y"}, T, r"got 1.0 \(float\)", _A_LABEL),
    Bad({"a": "x"}, V, "`groups` must be .*lacks 'b/0'", _PREFIX[1]),
    Bad(
        lambda tree: None,
        T,
        _RETURNED.replace("{p}", "groups") + "None",
        "a tree like the one",
        "Wrap",
    ),
    Bad(
        lambda path: "x", T, _RETURNED.replace("{p}", "groups") + "'x'", "tree", "Wrap"
    ),
]
_AN_AXIS = "`axis` must be an int or tuple of ints"
AXIS = [
    Bad("x", T, r"got 'x' \(str\)", _AN_AXIS),
    Bad(1.0, T, r"got 1.0 \(float\)", _AN_AXIS),
    Bad(True, T, r"got True \(bool\)", _AN_AXIS),
    Bad([0], T, r"got \[0\] \(list\)", _AN_AXIS),
    Bad((0, 1.5), T, r"got \(0, 1.5\) \(tuple\)", _AN_AXIS),
    Bad(
        5,
        V,
        r"got \(5,\) for the leaf 'a' of shape \(2,\)",
        "`axis` must name axes that each leaf has",
        "Exclude",
    ),
    Bad((0, -1), V, r"got \(0, -1\) for the leaf 'a'", "name each axis once", "`axis`"),
]
_AN_ORD = "`ord` must be a Python number above 0, or inf"
ORD = [
    Bad("x", T, r"got 'x' \(str\)", _AN_ORD),
    Bad(True, T, r"got True \(bool\)", _AN_ORD),
    Bad(jnp.ones(()), T, r"got Array", _AN_ORD, "static_args"),
    Bad(0, V, r"got 0 \(int\)", _AN_ORD),
    Bad(math.nan, V, r"got nan \(float\)", _AN_ORD),
    Bad(HUGE, V, "got an int beyond", _AN_ORD),
]
_ONE = "`{p}` must be one (finite )?number"
SCALAR = [
    Bad("x", T, r"got 'x' \(str\)", _ONE),
    Bad(None, T, r"got None \(NoneType\)", _ONE),
    Bad(True, T, r"got True \(bool\)", _ONE),
    Bad(jnp.ones(3), T, r"got Array", _ONE),
    Bad(-1.0, V, r"got -1.0 \(float\)", _ONE, of_each=True),
    Bad(math.nan, V, r"got nan \(float\)", _ONE),
    Bad(HUGE, V, "got an int beyond", _ONE),
]
_ABOVE = "`{p}` must be one finite number above 0"
SHARE = [
    *SCALAR,
    Bad(
        1.5,
        V,
        r"got 1.5 \(float\)",
        "`{p}` must be one number from 0 to 1",
        of_each=True,
    ),
]
_AN_INT = r"`{p}` must be an int from [01] to 2\*\*31 - 1"
LENGTH = [
    Bad("x", T, r"got 'x' \(str\)", _AN_INT),
    Bad(True, T, r"got True \(bool\)", _AN_INT),
    Bad(2.0, T, r"got 2.0 \(float\)", _AN_INT, "static_args=.'{p}'"),
    Bad(math.nan, T, r"got nan \(float\)", _AN_INT),
    Bad(jnp.ones((), int), T, "got Array.*", _AN_INT, "static_args=.'{p}'"),
    Bad(-1, V, r"got -1 \(int\)", _AN_INT, of_each=True),
    Bad(2**31, V, r"got 2147483648 \(int\)", _AN_INT),
    Bad(HUGE, V, "got an int beyond", _AN_INT),
]
_AT_LEAST_1 = r"`{p}` must be an int from 1 to"
_NAMES = "`axis_name` must be a name, a tuple of names"
AXIS_NAME = [
    Bad(3, T, r"got 3 \(int\)", _NAMES),
    Bad(math.nan, T, r"got nan \(float\)", _NAMES),
    Bad([3], T, r"got \[3\] \(list\)", _NAMES),
    Bad("i", V, "got 'i'", "`axis_name` must be an axis of the enclosing"),
]
CALLED = [
    Bad("x", T, rf"{_GIVEN}'x' \(str\)", "a function"),
    Bad(3, T, rf"{_GIVEN}3 \(int\)", "a function"),
]
_INNER = "`{p}` must be an optax transformation, got "
INNER = [
    Bad("adam", T, r"got 'adam' \(str\)", _INNER, "such as"),
    Bad(3, T, r"got 3 \(int\)", _INNER, "such as"),
    Bad(optax.adam, T, r"got <function adam.* \(function\)", _INNER, "such as"),
]
FLAG = [
    Bad(1, T, rf"{_GIVEN}1 \(int\)", "True or"),
    Bad(None, T, rf"{_GIVEN}None \(NoneType\)", "True or"),
]
OPTIONS = [Bad(3, T, "got options=3", r"options must be some of \[")]
HISTORY = [
    Bad(3, T, r"`history` must be .*, got 3 \(int\)", "a list of dicts"),
    Bad([3], T, r"`history` must be .*, got \[3\] \(list\)", "a list of dicts"),
    Bad([], V, "`history` must have a step", "what optclip.metrics returned"),
    Bad(
        {"clip/norm": [1.0, 2.0], "clip/rate": [1.0]},
        V,
        "got 1 and 2",
        "`history` must have the same number of steps",
        "",
    ),
    Bad({"clip/norm": ["x"]}, T, r"`history` at 'clip/norm' .*\['x'\]", "be numbers"),
]
_ORDER = "`lower` must be at most `upper`"
ABOVE_ZERO = [*SCALAR, Bad(0, V, r"got 0 \(int\)", _ABOVE, of_each=True)]
_A_STATE = "`opt_state` must be an optimizer state with an optclip clip in it"
_A_PATH = "`{p}` must be a path such as"
PATHS = [
    Bad(3, T, r"got 3 \(int\)", _A_PATH),
    Bad(("a", None), T, r"got \('a', None\)", _A_PATH),
    Bad((), V, r"got \(\) \(tuple\)", _A_PATH),
    Bad("kernel", V, "got 'kernel'", "must name leaves", "there are"),
]
_A_MODULE = "`{p}` must be the name of a module, or a pattern"
PATTERN = [
    Bad(3, T, r"got 3 \(int\)", _A_MODULE),
    Bad(None, T, "got None", _A_MODULE),
    Bad("kernel", V, "got 'kernel'", _A_MODULE, "paths are"),
]
_ONE_AXIS = [
    Bad("x", T, r"`{p}` must be .*got 'x' \(str\)", "an int, one axis"),
    Bad(True, T, r"`{p}` must be .*got True \(bool\)", "an int, one axis"),
    Bad((0,), T, r"`{p}` must be .*got \(0,\) \(tuple\)", "an int, one axis"),
    Bad(5, V, "got 5", "`{p}` must be an axis of", "Name the leaf"),
]
_A_LAYER = "`layers` must be a dict from the name of a layer"
_AN_ARRAY = "`{p}` must be a floating-point array of shape"
PROJECTED = [
    Bad("x", T, r"got 'x' \(str\)", _AN_ARRAY),
    Bad(np.ones((3, 2, 2), int), T, "got array", _AN_ARRAY),
    Bad(jnp.ones(3), V, r"got the shape \(3,\)", _AN_ARRAY, "Split"),
    Bad(jnp.ones((3, 3, 2)), V, "got 3 and 4|got 2 and 3", "must divide", "Both"),
]
ATTENTION = {
    "balance": SHARE,
    "block_size": [*LENGTH, Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1)],
    "by_group": FLAG,
    "head_dim": [
        *LENGTH,
        Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1),
        Bad(5, V, "got 4", "must have a multiple of 5", "Check"),
    ],
    "layers": [
        Bad(3, T, r"got 3 \(int\)", _A_LAYER, "find_heads"),
        Bad({}, V, r"got {} \(dict\)", _A_LAYER, "find_heads"),
        Bad({"a": "q"}, T, r"`layers` at 'a' must .*got 'q'", "be an optclip.Heads"),
    ],
    "max_logit": THRESHOLD,
    "max_logits": [
        Bad(3, T, r"got 3 \(int\)", "`max_logits` must be a dict", "computes these"),
        Bad({}, V, r"got \[\]", "must have the names of `layers`", "'attn'"),
        Bad({"attn": "x"}, T, "at 'attn' must be .*got 'x'", "an array of real"),
        Bad({"attn": np.ones(2)}, V, r"got \(2,\)", r"the shape \(4,\)", "Give"),
    ],
    "params": [
        Bad(None, V, "got 'query'|got 'query' ", "must", "there are|paths are"),
    ],
    "rope": [
        *LENGTH,
        Bad(2, V, "got 2", "must have at least 3 entries", "Check"),
    ],
    "scale": [
        Bad("x", T, r"`scale` must .*got 'x' \(str\)", "be a real number"),
        Bad(math.nan, V, r"`scale` must .*got nan", "not NaN"),
        Bad(jnp.ones(2), V, r"shape \(2,\)", "one product, of shape", "Give"),
    ],
    "stacked": [
        *_ONE_AXIS,
        Bad(1, V, "got 1 for both", "`stacked` must be another axis", "Check"),
    ],
}
_A_MASK = "`mask` must be bools that broadcast"

BY_PARAMETER = {
    "absolute": SCALAR,
    "alpha": ABOVE_ZERO,
    "b1": SHARE,
    "b2": SHARE,
    "clip": INNER,
    "ddof": LENGTH,
    "every": [
        *LENGTH,
        Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1),
    ],
    "floor": SHARE,
    "grace": LENGTH,
    "histories": [
        Bad(
            [3],
            T,
            r"`histories` must .*got \[3\] \(list\)",
            "a dict from what to call a run",
        ),
        Bad({}, V, "`histories` .* got none", "must have at least one", ""),
        Bad({"one": 3}, T, r"`history` must be .*, got 3 \(int\)", "a list of dicts"),
    ],
    "history": [
        *HISTORY,
        Bad({"loss": [1.0]}, V, "must have (norms|groups).*, got none", "what optclip"),
    ],
    "inner": INNER,
    "keep": CALLED,
    "learn_skipped": FLAG,
    "learning_rate": [
        Bad("x", T, rf"{_GIVEN}'x' \(str\)", "an optax schedule"),
        Bad(0.1, T, rf"{_GIVEN}0.1 \(float\)", "an optax schedule", "static_args"),
        Bad(lambda step: 0.1, V, "warmup=0", "must be given together", "Give both"),
    ],
    "low": SCALAR,
    "max_consecutive": LENGTH,
    "max_gradient": [
        *THRESHOLD[:3],
        Bad(math.nan, V, rf"{_GIVEN}nan \(float\)", _POSITIVE, _AT_ZERO),
        Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", _POSITIVE, _AT_ZERO),
        Bad({"a": 1.0}, T, rf"{_GIVEN}.* \(dict\)", "a real number"),
    ],
    "max_shrink": SHARE,
    "options": OPTIONS,
    "most": [
        *LENGTH,
        Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1),
    ],
    "sort_by": [
        Bad("size", V, r"`sort_by` must .*got 'size' \(str\)", "'rate'"),
        Bad(None, T, r"`sort_by` must .*got None \(NoneType\)", "'norm', 'rate'"),
    ],
    "part": [
        Bad("c", V, r"`part` must .*got 'c' \(str\)", r"\['a', 'b'\]"),
        Bad(3, V, r"`part` must .*got 3 \(int\)", r"\['a', 'b'\]"),
    ],
    "path": [
        Bad(3, T, r"`path` must .*got 3 \(int\)", "a str or a pathlib.Path"),
        Bad(None, T, r"`path` must .*got None \(NoneType\)", "a str or a pathlib.Path"),
    ],
    "power": ABOVE_ZERO,
    "rate": SHARE,
    "relative": SCALAR,
    "sigma": SCALAR,
    "skip_first": SHARE,
    "stacked": CALLED,
    "theta": SCALAR,
    "transposed": CALLED,
    "use_value": FLAG,
    "weight_decay": SCALAR,
    "ax": [
        Bad(3, T, r"`ax` must be .*, got 3 \(int\)", "Matplotlib axes"),
        Bad(
            np.array([None]),
            T,
            r"`ax` must be .*, got array.* \(ndarray\)",
            "Matplotlib axes",
        ),
    ],
    "axis": AXIS,
    "axis_name": AXIS_NAME,
    "blocks": [
        Bad(
            "x", T, r"`blocks` must .*got 'x' \(str\)", "a list of optclip.norms.Block"
        ),
        Bad([3], T, r"`blocks.0.` must .*got 3 \(int\)", "an optclip.norms.Block"),
    ],
    "clip_mask": MASK,
    "decay": SHARE,
    "eps": [*SCALAR, Bad(math.inf, V, r"got inf \(float\)", _ONE)],
    "function": [
        Bad(3, T, r"`function` must .*got 3 \(int\)", "a function"),
        Bad(None, T, "`function` must .*got None", "a function"),
    ],
    "groups": LABEL,
    "k": SCALAR,
    "labels": LABEL,
    "mask": MASK,
    "leaves": [
        Bad(jnp.ones(2), T, "`leaves` must .*got Array", "a list of arrays"),
        Bad(
            ["x"],
            T,
            r"A leaf of a block must .*got 'x' \(str\)",
            "floating-point array",
        ),
        Bad([jnp.arange(2)], T, r"got Array\(\[0, 1\]", "floating-point array"),
    ],
    "limit": [b for b in THRESHOLD if b.value is not None],
    "lower": [*BOUND, Bad(2.0, V, "lower=2.0 and upper=1.0", _ORDER, "Swap")],
    "max_norm": THRESHOLD,
    "max_rms": THRESHOLD,
    "min_norm": SCALAR,
    "mode": [
        Bad("z", V, r"`mode` must .*got 'z' \(str\)", "'reciprocal'"),
        Bad(None, T, r"`mode` must .*got None \(NoneType\)", "'reciprocal'"),
        Bad(["mean"], T, r"`mode` must .*got \['mean'\] \(list\)", "'reciprocal'"),
    ],
    "name": [
        Bad(3, T, r"`name` must be .*, got 3 \(int\)", "a non-empty string"),
        Bad("", T, r"`name` must be .*, got '' \(str\)", "a non-empty string"),
        Bad(None, T, r"`name` must be .*, got None \(NoneType\)", "a non-empty string"),
    ],
    "nonfinite": [
        Bad("nan", V, r"`nonfinite` must .*got 'nan' \(str\)", "'propagate'"),
        Bad(None, T, r"`nonfinite` must .*got None \(NoneType\)", "'propagate'"),
        Bad(["zero"], T, r"`nonfinite` must .*got \['zero'\] \(list\)", "'propagate'"),
    ],
    "norm": [
        Bad("x", T, r"`norm` must .*got 'x' \(str\)", "'average'"),
        Bad(None, T, r"`norm` must .*got None \(NoneType\)", "an order p"),
        Bad(True, T, r"`norm` must .*got True \(bool\)", "an order p"),
        Bad(-1.0, V, r"got -1.0 \(float\)", "above 0"),
    ],
    "norm_mask": MASK,
    "opt_state": [
        Bad((), V, r"got \(\) \(tuple\)", _A_STATE),
        Bad("x", V, r"got 'x' \(str\)", _A_STATE),
        Bad(None, V, r"got None \(NoneType\)", _A_STATE),
    ],
    "ord": ORD,
    "over": [
        Bad("all", T, r"`over` must .*got 'all' \(str\)", "'tree', 'leaf'"),
        Bad(None, T, r"`over` must .*got None \(NoneType\)", "'tree', 'leaf'"),
        Bad(scopes.Scope, T, r"`over` must .*got <class .*Scope", "'tree', 'leaf'"),
    ],
    "per_count": SCALAR,
    "q": SHARE,
    "ratio": SCALAR,
    "record": [
        Bad("all", T, r"`record` must .*got 'all' \(str\)", "True, False or 'leaves'"),
        Bad(1, T, r"`record` must .*got 1 \(int\)", "True, False or 'leaves'"),
        Bad(np.ones(2), T, r"`record` must .*got array\(", "True, False or 'leaves'"),
    ],
    "response": [
        Bad("soft", V, r"`response` must .*got 'soft' \(str\)", "'hard'"),
        Bad(
            3, T, r"`response` must .*got 3 \(int\)", r"coefficient\(norm, threshold\)"
        ),
        Bad(
            None,
            T,
            r"`response` must .*got None \(NoneType\)",
            r"coefficient\(norm, threshold\)",
        ),
        Bad(responses.Smooth, T, "`response` must .*got .*Smooth", "an object"),
        Bad(jnp.ones(()), T, "`response` must .*got Array", "static_args"),
        Bad(
            lambda n, c: None,
            T,
            r"got None \(NoneType\)",
            "What `response` returns must be a real number",
        ),
    ],
    "sharpness": [*SCALAR, Bad(0, V, r"got 0 \(int\)", _ABOVE)],
    "skip_spikes": [
        Bad(1, T, r"`skip_spikes` must .*got 1 \(int\)", "True or"),
        Bad(None, T, r"`skip_spikes` must .*got None \(NoneType\)", "True or"),
    ],
    "strict": [
        Bad(1, T, r"`strict` must .*got 1 \(int\)", "True or"),
        Bad("yes", T, r"`strict` must .*got 'yes' \(str\)", "True or"),
        Bad(None, T, r"`strict` must .*got None \(NoneType\)", "True or"),
    ],
    "threshold": THRESHOLD,
    "tree": [
        Bad("x", T, r"The tree must .*got 'x' \(str\)", "an array", "Remove it"),
        Bad(
            {"a": {"b": "x"}},
            T,
            r"The leaf 'a/b' must .*got 'x' \(str\)",
            "an array",
            "Remove it",
        ),
        Bad(
            [np.array(["x"])], T, "The leaf '0' must .*got <U1", "floating", "Remove it"
        ),
        Bad([object()], T, r"The leaf '0' must .*\(object\)", "an array", "Remove it"),
    ],
    "upper": [*BOUND, Bad(-2.0, V, "lower=-1.0 and upper=-2.0", _ORDER, "Swap")],
    "value": [
        *THRESHOLD[:3],
        Bad(math.nan, V, rf"{_GIVEN}nan \(float\)", _POSITIVE, _AT_ZERO),
        Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", _POSITIVE, _AT_ZERO),
        Bad(HUGE, V, f"{_GIVEN}an int beyond", "in the range of floats, or inf"),
        Bad({"a": 1.0}, T, rf"{_GIVEN}.* \(dict\)", "a real number"),
        Bad(None, T, rf"{_GIVEN}None \(NoneType\)", "a real number"),
    ],
    "warmup": LENGTH,
    "window": [
        *LENGTH,
        Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1),
    ],
    "z": [*SCALAR, Bad(0, V, r"got 0 \(int\)", _ABOVE)],
}
UNIT_AXIS = [
    *CALLED,
    Bad(lambda path, shape: 1.5, T, r"got 1.5 \(float\)", _AN_AXIS),
    Bad(
        lambda path, shape: 7,
        V,
        r"got \(7,\) for the leaf",
        "`axis` must name axes",
        "with mask=",
    ),
]
_NUMBER_ONLY = [row for row in BY_PARAMETER["value"] if row.value != {"a": 1.0}]
_LETS_NONE_GROW = "1 lets no norm grow"
_GROWTH = [
    *THRESHOLD[:3],
    Bad(math.nan, V, rf"{_GIVEN}nan \(float\)", _POSITIVE, _LETS_NONE_GROW),
    Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", _POSITIVE, _LETS_NONE_GROW),
    Bad(HUGE, V, f"{_GIVEN}an int beyond", "in the range of floats, or inf"),
    Bad(None, T, rf"{_GIVEN}None \(NoneType\)", "a real number"),
]

# Of a clip whose one norm no array fits, which is known before the first step.
_OF_TREE = [
    Bad(bad.value, T, rf"{_GIVEN}array", "one number, .* rule", "[Cc]all")
    if np.ndim(bad.value) == 2
    else bad
    for bad in THRESHOLD
]

ATTENDING = (
    "Heads",
    "find_heads",
    "clip_attention_logits",
    "functional.clip_attention_logits",
    "functional.max_attention_logit",
)

# Where a parameter means something else than under the same name elsewhere.
BY_CALL = {
    **{
        (name, parameter): rows
        for name in ATTENDING
        for parameter, rows in ATTENTION.items()
        if parameter in inspect.signature(CALLS[name].function).parameters
    },
    ("Heads", "query"): PATHS,
    ("Heads", "key"): PATHS,
    ("Heads", "axis"): _ONE_AXIS,
    ("find_heads", "query"): PATTERN,
    ("find_heads", "key"): PATTERN,
    ("find_heads", "axis"): _ONE_AXIS,
    ("functional.max_attention_logit", "query"): PROJECTED,
    ("functional.max_attention_logit", "key"): PROJECTED,
    ("functional.max_attention_logit", "mask"): [
        Bad("x", T, r"got 'x' \(str\)", _A_MASK),
        Bad(np.ones((3, 3)), T, "got array", _A_MASK, "Give mask > 0"),
        Bad(np.ones(5, bool), V, r"got the shape \(5,\)", _A_MASK, "Give"),
    ],
    ("functional.max_attention_logit", "axis_name"): [
        row for row in AXIS_NAME if row.value != [3]
    ],
    ("clip_by", "threshold"): _OF_TREE,
    ("clip_by_global_norm", "max_norm"): _OF_TREE,
    ("recipes.auto_s", "max_norm"): _OF_TREE,
    ("Band", "max_growth"): _GROWTH,
    ("band", "max_growth"): _GROWTH,
    ("ema", "start"): [
        Bad("last", V, r"`start` must .*got 'last' \(str\)", "'first'"),
        Bad(None, T, r"`start` must .*got None \(NoneType\)", "'first'"),
    ],
    ("of_gradients", "rule"): [
        Bad("x", T, rf"{_GIVEN}'x' \(str\)", "a rule"),
        Bad({"a": 1.0}, T, rf"{_GIVEN}.* \(dict\)", "one number, .* rule"),
        Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", _POSITIVE, _AT_ZERO),
    ],
    ("recipes.adagc", "max_norm"): _NUMBER_ONLY,
    ("recipes.agc", "axis"): UNIT_AXIS,
    ("recipes.aggc", "groups"): [row for row in LABEL if row.value is not None],
    ("recipes.aggc", "high"): ABOVE_ZERO,
    ("recipes.aggc", "max_growth"): _GROWTH,
    ("recipes.auto_s", "gamma"): SCALAR,
    ("recipes.sclip", "c"): SCALAR,
    ("recipes.sclip", "tau"): ABOVE_ZERO,
    ("recipes.zclip", "max_norm"): _NUMBER_ONLY,
    ("skip", "max_value"): [
        Bad("x", T, rf"{_GIVEN}'x' \(str\)", "a rule"),
        Bad({"a": 1.0}, T, rf"{_GIVEN}.* \(dict\)", "one number, .* rule"),
        Bad(math.nan, V, rf"{_GIVEN}nan \(float\)", _POSITIVE, _AT_ZERO),
        Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", _POSITIVE, _AT_ZERO),
    ],
    ("suggest", "norms"): [
        Bad("x", T, r"`norms` must .*got 'x' \(str\)", "an array of numbers"),
        Bad(None, V, "got 0", "`norms` must have at least 10"),
        Bad(np.ones(3), V, "got 3", "`norms` must have at least 10"),
        Bad(-np.ones(99), V, "got .*-1.0", "`norms` must be 0 or more"),
    ],
    **{
        (f"plot.{name}", "clip"): [
            Bad("x", V, r"`clip` must .*got 'x' \(str\)", r"\['clip'\]"),
            Bad(3, V, r"`clip` must .*got 3 \(int\)", r"\['clip'\]"),
        ]
        for name in ("norms", "rate", "distribution", "heatmap", "runs")
    },
    ("plot.save", "history"): HISTORY,
    ("units", "axis"): UNIT_AXIS,
    ("ema", "max_norm"): _NUMBER_ONLY,
    ("previous_norm", "max_norm"): SCALAR,
    ("zscore", "max_norm"): _NUMBER_ONLY,
    ("clip_by_value", "response"): [
        *BY_PARAMETER["response"][:-1],
        Bad(lambda n, c: 1.0, V, "Two bounds", "response='hard'", "Give over="),
    ],
    ("axes", "axis"): [
        *AXIS,
        Bad(None, T, r"got None \(NoneType\)", _AN_AXIS),
    ],
    ("Block", "axis"): [
        Bad("x", T, r"`axis` must .*got 'x' \(str\)", "a tuple of ints"),
        Bad((-1,), T, r"`axis` must .*got \(-1,\)", "counted from 0"),
        Bad(
            (3,),
            V,
            r"`axis` must .*got \(3,\)",
            "name axes that the leaf has",
            "`axis`",
        ),
    ],
    ("functional.clip_by_global_norm", "use_norm"): [
        Bad("x", T, rf"{_GIVEN}'x' \(str\)", "a real scalar of 0 or more"),
        Bad(jnp.ones(2), T, f"{_GIVEN}Array", "a real scalar of 0 or more"),
        Bad(True, T, rf"{_GIVEN}True \(bool\)", "a real scalar of 0 or more"),
        Bad(-1.0, V, rf"{_GIVEN}-1.0 \(float\)", "a real scalar of 0 or more"),
    ],
}

_TWO = [
    Bad([0, 1], T, r"`matrix_axes` must be .*got \[0, 1\]", "a tuple of two ints"),
    Bad((0,), V, r"`matrix_axes` must be .*got \(0,\)", "a tuple of two ints"),
    Bad((0.5, 1), T, r"got \(0.5, 1\)", "a tuple of two ints"),
    Bad((-3, -1), V, r"got \(-3, -1\)", "`matrix_axes` must name axes"),
]
_METHOD = [
    Bad("svd", V, r"`{p}` must be .*got 'svd'", "one of"),
    Bad(3, T, r"`{p}` must be .*got 3", "one of"),
]
_COUNT = [
    Bad("x", T, r"`{p}` must be .*got 'x' \(str\)", "an int from"),
    Bad(-1, V, r"`{p}` must be .*got -1", "an int from"),
]
for _name in ("", "functional."):
    BY_CALL[f"{_name}clip_by_singular_value", "response"] = [
        row for row in BY_PARAMETER["response"] if row.value != "soft"
    ]
    for _clip in ("clip_by_spectral_norm", "clip_by_singular_value"):
        BY_CALL[f"{_name}{_clip}", "matrix_axes"] = _TWO
    BY_CALL[f"{_name}clip_by_singular_value", "method"] = _METHOD
    BY_CALL[f"{_name}clip_by_singular_value", "max_value"] = BY_PARAMETER["max_norm"]
BY_CALL |= {
    ("matrices", "matrix_axes"): _TWO,
    ("singular_values", "matrix_axes"): _TWO,
    ("singular_values", "method"): _METHOD,
    ("Spectral", "method"): _METHOD,
    ("clip_by_spectral_norm", "method"): _METHOD,
    ("Spectral", "steps"): _COUNT,
    ("clip_by_spectral_norm", "steps"): _COUNT,
    ("recipes.spectra", "matrix_axes"): _TWO,
    ("recipes.spectra", "method"): _METHOD,
    ("recipes.spectra", "max_value"): BY_PARAMETER["value"],
    ("recipes.spectra", "warmup"): [
        *LENGTH,
        Bad(5, V, "got learning_rate=None and warmup=5", "given together", "Give both"),
    ],
}

_PLACES = "`{p}` must be an int of 0 or more, or a tuple of them"
ARGNUMS = [
    Bad("x", T, r"got 'x' \(str\)", _PLACES),
    Bad(1.0, T, r"got 1.0 \(float\)", _PLACES),
    Bad(True, T, r"got True \(bool\)", _PLACES),
    Bad((), V, r"got \(\) \(tuple\)", _PLACES),
    Bad(-1, V, r"got -1 \(int\)", _PLACES),
    Bad((0, 0), V, r"got .*\(0, 0\)", "must name each argument once"),
    Bad(7, T, "got 2", "with at least 8 arguments", "must be called"),
]
_A_LOSS = r"a function loss\(params, example\)"
_A_SCOPE = r"`over` must be 'tree', 'leaf' or optclip.groups\(...\), got"
_A_SUM = "`{p}` must be one of 'sum', 'none'"
_OF_BATCH = "must have the same first axis"
_OF_LEAVES = (_PREFIX[0], r"`{p}` of shape \(7, 7\)")
EXAMPLES = {
    "argnums": ARGNUMS,
    "batch_argnums": ARGNUMS,
    "has_aux": FLAG,
    "loss": [
        Bad("x", T, r"`loss` must be .*got 'x' \(str\)", _A_LOSS),
        Bad(None, T, r"`loss` must be .*got None", _A_LOSS),
        Bad(
            lambda p, x: p["a"],
            T,
            r"got float32\[2\]",
            "must return one real number for one example",
            "give has_aux=True",
        ),
        Bad(
            lambda p, x: jnp.ones((), int),
            T,
            r"got int32\[\]",
            "must return one real number for one example",
            "give has_aux=True",
        ),
    ],
    "microbatch_size": [*LENGTH, Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1)],
    "normalize_by": [*SCALAR, Bad(0, V, r"got 0 \(int\)", _ABOVE)],
    "over": [
        *BY_PARAMETER["over"],
        Bad("element", V, r"`over` must be .*got 'element'", _A_SCOPE),
        Bad(optclip.axes(0), V, r"`over` must be .*got Axes", _A_SCOPE),
        Bad(
            optclip.groups({"a": "x", "b": None}),
            V,
            "got the leaf 'b/0' in none",
            "must be in a group",
            "Label it",
        ),
    ],
    "method": [
        Bad("gram", V, r"`method` must be .*got 'gram' \(str\)", "'vmap', 'ghost'"),
        Bad(None, T, r"`method` must be .*got None", "'vmap', 'ghost'"),
    ],
    "padding": [
        Bad("x", T, r"got 'x' \(str\)", "an array of 2 bools"),
        Bad(jnp.ones(2), T, r"got Array\(\[1", "an array of 2 bools"),
        Bad(np.ones(3, bool), V, r"got array\(\[ True", "an array of 2 bools"),
    ],
    "response": [
        *BY_PARAMETER["response"],
        Bad("soft", V, r"got 'soft' \(str\)", "'auto_s'.*'unit'"),
        Bad("proportional", V, r"got 'proportional' \(str\)", "'auto_s', 'drop'"),
    ],
    "threshold": [
        *(row for row in THRESHOLD if row.given not in _OF_LEAVES),
        Bad([], V, _GIVEN, "one number for over='tree'", "Give over='leaf'"),
        Bad({"a": 1.0}, V, _GIVEN, "one number for over='tree'", "Give over='leaf'"),
        Bad(np.ones(2), V, rf"{_GIVEN}array", "one number for each norm", r"\(2,\)"),
    ],
    "reduce": [
        Bad("mean", V, r"`reduce` must be .*got 'mean' \(str\)", _A_SUM),
        Bad(None, T, r"`reduce` must be .*got None", _A_SUM),
    ],
    "grads": [
        Bad({}, V, "got first axes of no array", _OF_BATCH),
        Bad(1.0, V, r"got first axes of \[\(\)\]", _OF_BATCH),
        Bad(
            [jnp.ones(2), jnp.ones(3)],
            V,
            r"got first axes of \[\(2,\), \(3,\)\]",
            _OF_BATCH,
        ),
    ],
    "quantile": SHARE,
    "learning_rate": ABOVE_ZERO,
    "init_value": ABOVE_ZERO,
    "count_noise": [
        *SCALAR,
        Bad(1.0, V, "`expected_batch_size` must be .*got None", "is `count_noise`"),
    ],
    "expected_batch_size": [row for row in ABOVE_ZERO if row.value is not None],
}
BY_CALL |= {
    (name, parameter): rows
    for name in CALLS
    if name.startswith("per_example.")
    for parameter, rows in EXAMPLES.items()
    if parameter in inspect.signature(CALLS[name].function).parameters
}

_A_PROBE = "`probe` must be what optclip.cotangent_probe"
_COMPARED = "`relative` must be 'rms', 'median', a number from 0 to 1"
BY_CALL |= {
    ("cotangent_probe", "steps"): [
        *LENGTH,
        Bad(0, V, r"got 0 \(int\)", _AT_LEAST_1),
    ],
    ("with_clipped_cotangent", "block"): CALLED,
    ("clip_cotangent", "name"): [
        Bad(3, T, r"got 3 \(int\)", "`name` must be a string, or None"),
        Bad("", V, "got ''", "`name` must be a string that is not empty"),
    ],
    ("clip_cotangent", "probe"): [
        Bad(3, T, r"got 3 \(int\)", _A_PROBE),
        Bad(jnp.ones(6), T, "got Array", _A_PROBE),
    ],
    ("clip_cotangent", "relative"): [
        Bad("mean", V, r"got 'mean' \(str\)", _COMPARED),
        Bad(True, T, r"got True \(bool\)", _COMPARED),
        Bad({}, T, "got {}", _COMPARED),
        Bad(1.5, V, "got 1.5", "`relative` must be one number from 0 to 1"),
        Bad(jnp.ones(2), T, "got Array", "`relative` must be one"),
        Bad(lambda norms: None, T, "got None", "What `relative` returns must be one"),
    ],
}
