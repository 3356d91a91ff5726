"""The table of bad input: for each parameter, values that are refused, and the words.

`CALLS` says how each public callable is called rightly; a row is one such call with
one argument replaced. The texts hold `{p}` where the parameter is named.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import optclip
from optclip import functional, norms, plot, recipes, responses, scopes, thresholds

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
    remedy: str = r"\b[Gg]ive\b"
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
    "Band": Call(responses.Band, {"low": 0.5}, _clips_by),
    "band": Call(responses.band, {}, _clips_by),
    "Smooth": Call(responses.Smooth, {}),
    "Detached": Call(responses.Detached, {"response": "hard"}, _clips_by),
    "detached": Call(responses.detached, {}, _clips_by),
    "Bounds": Call(
        thresholds.Bounds,
        {"lower": -1.0, "upper": 1.0},
        lambda b: clips(optclip.clip_by(b, over=scopes.ELEMENT)),
    ),
    "bounds": Call(
        thresholds.bounds,
        {"lower": -1.0, "upper": 1.0},
        lambda b: clips(optclip.clip_by(b, over=scopes.ELEMENT)),
    ),
    "constant": Call(thresholds.constant, {"value": 1.0}),
    "schedule": Call(thresholds.schedule, {"function": lambda step: 1.0}),
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
    "after": Call(optclip.after, {"inner": ADAM, "clip": CLIP}, clips),
    "skip": Call(optclip.skip, {"inner": ADAM}, clips),
    "with_carry": Call(optclip.with_carry, {"clip": CLIP}, clips),
    "with_reset": Call(optclip.with_reset, {"inner": ADAM}, clips),
    "suggest": Call(optclip.suggest, {"norms": np.arange(100.0)}),
    "summary": Call(
        optclip.summary, {"opt_state": optclip.clip_by_norm(1.0).init(TREE)}
    ),
    "functional.global_norm": Call(functional.global_norm, {"tree": TREE}),
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
}.items():
    CALLS[_name] = Call(getattr(optclip, _name), _right, clips)
    CALLS[f"functional.{_name}"] = Call(
        getattr(functional, _name), _right | {"tree": TREE}
    )
T, V = TypeError, ValueError
_NUMBER = "[Nn]umber"
_PREFIX = (
    "{p} has the structure .* no prefix of",
    "[Oo]ne value, or a tree|give one number",
)
BOUND = [
    Bad("x", T, r"{p}(=| holds )'x' \(str\)", _NUMBER),
    Bad(1j, T, r"{p}(=| holds )1j \(complex\)", _NUMBER),
    Bad(True, T, r"{p}(=| holds )True \(bool\)", _NUMBER),
    Bad({"a": 1.0, "b": "x"}, T, r"{p}(=| holds )'x' \(str\)", _NUMBER),
    Bad(math.nan, V, "{p}=nan is NaN", "a number"),
    Bad(jnp.array([1.0, jnp.nan]), V, "{p}=.* is NaN", "a number"),
    Bad(HUGE, V, "{p} is an int above the largest", "less"),
    Bad(np.ones((7, 7)), V, r"{p} has shape \(7, 7\)", "a number, (or )?an array"),
    Bad([], V, *_PREFIX),
    Bad({"a": 1.0, "z": 1.0, "b": 1.0}, V, *_PREFIX),
]
THRESHOLD = [
    *BOUND,
    Bad(None, T, "{p}=None", "a number, or inf"),
    Bad(-1.0, V, "{p}=-1.0 is negative", "0 or more"),
    Bad(np.array([-1.0]), V, r"{p}=\[-1\.\] is negative", "0 or more"),
]
MASK = [
    Bad("x", T, r"{p} holds 'x' \(str\) for the leaf 'a'", "True or False"),
    Bad(1, T, r"{p} holds 1 \(int\)", "True or False"),
    Bad(math.nan, T, r"{p} holds nan \(float\)", "True or False"),
    Bad(jnp.array(True), T, r"{p} holds .*Array\(True", "static_args=.'{p}'"),
    Bad({"a": True}, V, _PREFIX[0] + ".*lacks 'b/0'", _PREFIX[1]),
    Bad([], V, *_PREFIX),
    Bad(
        lambda tree: None, T, "as {p} returned None", "of the same structure", "returns"
    ),
    Bad(lambda path: True, T, "as {p} returned True", "a tree", "wrap"),
]
LABEL = [
    Bad(None, T, "groups=None puts no leaf", "a tree of strings"),
    Bad(3, T, r"groups holds the label 3 \(int\)", "a label is a string"),
    Bad({"a": 1.0, "b": "y"}, T, r"the label 1.0 \(float\)", "a label is a string"),
    Bad({"a": "x"}, V, "groups has .*lacks 'b/0'", _PREFIX[1]),
    Bad(lambda tree: None, T, "as groups returned None", "same structure", "returns"),
    Bad(lambda path: "x", T, "as groups returned 'x'", "a tree", "wrap"),
]
AXIS = [
    Bad("x", T, "axis='x'", "int or tuple of ints"),
    Bad(1.0, T, "axis=1.0", "int or tuple of ints"),
    Bad(True, T, "axis=True", "int or tuple of ints"),
    Bad([0], T, r"axis=\[0\]", "int or tuple of ints"),
    Bad(
        5, V, r"axis=\(5,\) is out of range for the leaf 'a'", r"shape \(2,\)", "Leave"
    ),
    Bad((0, -1), V, r"axis=\(0, -1\) names an axis .*'a'.* twice", "each axis once"),
]
ORD = [
    Bad("x", T, r"ord='x' \(str\)", "a number above 0"),
    Bad(True, T, r"ord=True \(bool\)", "a number above 0"),
    Bad(jnp.ones(()), T, r"ord=Array", "static_args"),
    Bad(0, V, "ord=0 is not above 0", "p > 0"),
    Bad(math.nan, V, "ord=nan is not above 0", "p > 0"),
    Bad(HUGE, V, "ord=10+", "a finite number"),
]
SCALAR = [
    Bad("x", T, r"{p}='x' \(str\)", "a finite number"),
    Bad(None, T, r"{p}=None \(NoneType\)", "a finite number"),
    Bad(True, T, r"{p}=True \(bool\)", "a finite number"),
    Bad(jnp.ones(3), T, r"{p}=Array", "as a scalar"),
    Bad(-1.0, V, "{p}=-1.0 .*out of range", "a finite number", of_each=True),
    Bad(math.nan, V, "{p}=nan .*out of range", "a finite number"),
    Bad(HUGE, V, "{p}=10+", "a finite number"),
]
SHARE = [*SCALAR, Bad(1.5, V, "{p}=1.5 is above 1", "from 0 to 1", of_each=True)]
LENGTH = [
    Bad("x", T, r"{p}='x' \(str\) is no int", "an int of [01] or more"),
    Bad(True, T, r"{p}=True \(bool\) is no int", "an int of [01] or more"),
    Bad(2.0, T, r"{p}=2.0 \(float\) is no int", "static_args=.'{p}'"),
    Bad(math.nan, T, r"{p}=nan \(float\) is no int", "an int of [01] or more"),
    Bad(jnp.ones((), int), T, r"{p}=Array.* is no int", "static_args=.'{p}'"),
    Bad(-1, V, r"{p}=-1 \(int\) is below", "an int of [01] or more", of_each=True),
    Bad(HUGE, V, "{p} is an int above the largest", "less"),
]
AXIS_NAME = [
    Bad(3, T, r"axis_name=3 \(int\) names no", "a tuple of names"),
    Bad(math.nan, T, r"axis_name=nan \(float\) names no", "a tuple of names"),
    Bad([3], T, r"axis_name=\[3\] \(list\) names no", "a tuple of names"),
    Bad("i", V, "axis_name='i' is no mapped axis", "an axis of the enclosing"),
]
CALLED = [
    Bad("x", T, r"{p}='x' \(str\) cannot be called", "a function"),
    Bad(3, T, r"{p}=3 \(int\) cannot be called", "a function"),
]
INNER = [
    Bad("adam", T, r"{p}='adam' \(str\) is no optax transf", "such as"),
    Bad(3, T, r"{p}=3 \(int\) is no optax transf", "such as"),
    Bad(optax.adam, T, r"{p}=<function adam.* is no optax transf", "such as"),
]
FLAG = [
    Bad(1, T, r"{p}=1 \(int\)", "True or"),
    Bad(None, T, r"{p}=None \(NoneType\)", "True or"),
]
OPTIONS = [Bad(3, T, "options=3", "not known", "Give some of")]
HISTORY = [
    Bad(3, T, r"history=3 \(int\)", "a list of dicts"),
    Bad([3], T, r"history=\[3\] \(list\)", "a list of dicts"),
    Bad([], V, "history holds no step", "what optclip.metrics returned"),
    Bad(
        {"clip/norm": [1.0, 2.0], "clip/rate": [1.0]},
        V,
        "of 1 and of 2 steps",
        "as many steps",
    ),
    Bad({"clip/norm": ["x"]}, T, r"'clip/norm' .*\['x'\]", "numbers"),
]
ABOVE_ZERO = [*SCALAR, Bad(0, V, "{p}=0 .*out of range", "above 0", of_each=True)]
BY_PARAMETER = {
    "absolute": SCALAR,
    "alpha": ABOVE_ZERO,
    "b1": SHARE,
    "b2": SHARE,
    "clip": INNER,
    "ddof": LENGTH,
    "every": [
        *LENGTH,
        Bad(0, V, r"every=0 \(int\) is below 1", "an int of [01] or more"),
    ],
    "floor": SHARE,
    "grace": LENGTH,
    "histories": [
        Bad([3], T, "histories=.* is no dict", "a dict from what to call a run"),
        Bad({}, V, "histories holds no run", "at least one"),
        Bad({"one": 3}, T, "history=3", "a list of dicts"),
    ],
    "history": [
        *HISTORY,
        Bad({"loss": [1.0]}, V, "holds no (norms|groups)", "what optclip"),
    ],
    "inner": INNER,
    "keep": CALLED,
    "learn_skipped": FLAG,
    "low": SCALAR,
    "max_consecutive": LENGTH,
    "max_shrink": SHARE,
    "options": OPTIONS,
    "most": [
        *LENGTH,
        Bad(0, V, r"most=0 \(int\) is below 1", "an int of [01] or more"),
    ],
    "sort_by": [
        Bad("size", V, "sort_by='size' is not known", "'rate'"),
        Bad(None, T, r"sort_by=None \(NoneType\)", "'norm', 'rate'"),
    ],
    "part": [
        Bad("c", V, "part='c' is not one of", r"\['a', 'b'\]"),
        Bad(3, V, "part=3 is not one of", r"\['a', 'b'\]"),
    ],
    "path": [
        Bad(3, T, r"path=3 \(int\) is no path", "str"),
        Bad(None, T, r"path=None \(NoneType\) is no path", "str"),
    ],
    "power": ABOVE_ZERO,
    "rate": SHARE,
    "relative": SCALAR,
    "sigma": SCALAR,
    "skip_first": SHARE,
    "stacked": CALLED,
    "theta": SCALAR,
    "use_value": FLAG,
    "weight_decay": SCALAR,
    "when": THRESHOLD,
    "ax": [
        Bad(3, T, r"ax=3 \(int\) is no", "Matplotlib axes"),
        Bad(np.array([None]), T, r"ax=array.* \(ndarray\) is no", "Matplotlib axes"),
    ],
    "axis": AXIS,
    "axis_name": AXIS_NAME,
    "blocks": [
        Bad("x", T, r"blocks='x' \(str\)", "a list of optclip.norms.Block"),
        Bad([3], T, r"blocks holds 3 \(int\)", "a list of optclip.norms.Block"),
    ],
    "clip_mask": MASK,
    "decay": SHARE,
    "eps": [*SCALAR, Bad(math.inf, V, "eps=inf .*out of range", "a finite number")],
    "function": [
        Bad(3, T, "function=3.* cannot be called", "a function|an optax schedule"),
        Bad(None, T, "function=None.* cannot be called", "a function|an optax"),
    ],
    "groups": LABEL,
    "k": SCALAR,
    "labels": LABEL,
    "leaves": [
        Bad(jnp.ones(2), T, "leaves=Array", "a list of arrays"),
        Bad(["x"], T, r"holds 'x' \(str\)", "floating-point arrays"),
        Bad([jnp.arange(2)], T, r"holds Array\(\[0, 1\]", "floating-point arrays"),
    ],
    "limit": [b for b in THRESHOLD if b.value is not None],
    "lower": [*BOUND, Bad(2.0, V, "lower=2.0 is above upper=1.0", "arrays", "Swap")],
    "max_norm": THRESHOLD,
    "max_rms": THRESHOLD,
    "min_norm": SCALAR,
    "mode": [
        Bad("z", V, "mode='z' is not known", "'reciprocal'"),
        Bad(None, T, r"mode=None \(NoneType\)", "'reciprocal'"),
        Bad(["mean"], T, r"mode=\['mean'\] \(list\)", "'reciprocal'"),
    ],
    "name": [
        Bad(3, T, "name=3", "a non-empty string"),
        Bad("", T, "name=''", "a non-empty string"),
        Bad(None, T, "name=None", "a non-empty string"),
    ],
    "nonfinite": [
        Bad("nan", V, "nonfinite='nan' is not known", "'propagate'"),
        Bad(None, T, r"nonfinite=None \(NoneType\)", "'propagate'"),
        Bad(["zero"], T, r"nonfinite=\['zero'\] \(list\)", "'propagate'"),
    ],
    "norm": [
        Bad("x", T, "norm='x'", "optclip.norms.L1"),
        Bad(None, T, "norm=None", "optclip.norms.L1"),
        Bad(2, T, "norm=2", "optclip.norms.L1"),
    ],
    "norm_mask": MASK,
    "opt_state": [
        Bad((), V, "no optclip clip in this state, a tuple", "optimizer state"),
        Bad("x", V, "no optclip clip in this state, a str", "optimizer state"),
        Bad(None, V, "no optclip clip in this state, a None", "optimizer state"),
    ],
    "ord": ORD,
    "over": [
        Bad("tree", T, "over='tree' is no scope", "optclip.TREE"),
        Bad(None, T, "over=None is no scope", "optclip.TREE"),
        Bad(type(optclip.TREE), T, "over=.*Tree.* is no scope", "optclip.TREE"),
    ],
    "per_count": SCALAR,
    "q": SHARE,
    "ratio": SCALAR,
    "record": [
        Bad("all", T, "record='all'", "True, False or 'leaves'"),
        Bad(1, T, "record=1", "True, False or 'leaves'"),
        Bad(np.ones(2), T, "record=array", "True, False or 'leaves'"),
    ],
    "response": [
        Bad("soft", V, "response='soft'", "'hard'"),
        Bad(3, T, "response=3", r"coefficient\(norm, threshold\)"),
        Bad(None, T, "response=None", r"coefficient\(norm, threshold\)"),
        Bad(responses.Smooth, T, "response=.*Smooth", "an object"),
        Bad(jnp.ones(()), T, "response=Array", "static_args"),
        Bad(lambda n, c: None, T, "returned None", "a real number", "Return"),
    ],
    "sharpness": [*SCALAR, Bad(0, V, "sharpness=0 .*out of range", "above 0")],
    "skip_spikes": [
        Bad(1, T, r"skip_spikes=1 \(int\)", "True or"),
        Bad(None, T, r"skip_spikes=None \(NoneType\)", "True or"),
    ],
    "strict": [
        Bad(1, T, r"strict=1 \(int\)", "True or"),
        Bad("yes", T, r"strict='yes' \(str\)", "True or"),
        Bad(None, T, r"strict=None \(NoneType\)", "True or"),
    ],
    "threshold": THRESHOLD,
    "tree": [
        Bad("x", T, "The tree, .*is a str", "arrays", "Remove it"),
        Bad({"a": {"b": "x"}}, T, "leaf at 'a/b' is a str", "arrays", "Remove it"),
        Bad([np.array(["x"])], T, "leaf at '0' has dtype <U1", "floating", "Remove it"),
        Bad([object()], T, "leaf at '0' is a object", "arrays", "Remove it"),
    ],
    "upper": [*BOUND, Bad(-2.0, V, "lower=-1.0 is above upper=-2.0", "arrays", "Swap")],
    "value": [
        *THRESHOLD[:3],
        Bad(math.nan, V, "value=nan is NaN", "a number"),
        Bad(-1.0, V, "value=-1.0 is negative", "0 or more"),
        Bad(HUGE, V, "value is an int above the largest", "less"),
        Bad({"a": 1.0}, T, r"value=.* \(dict\)", "a real number"),
        Bad(None, T, "value=None", "a real number"),
    ],
    "warmup": LENGTH,
    "window": [
        *LENGTH,
        Bad(0, V, r"window=0 \(int\) is below 1", "an int of [01] or more"),
    ],
    "z": [*SCALAR, Bad(0, V, "z=0 .*out of range", "above 0")],
}
UNIT_AXIS = [
    *CALLED,
    Bad(lambda path, shape: 1.5, T, "axis=1.5", "int or tuple of ints"),
    Bad(lambda path, shape: 7, V, r"axis=\(7,\) is out of range", "Leave", "clip_mask"),
]
_NUMBER_ONLY = [
    *THRESHOLD[:3],
    Bad(math.nan, V, "{p}=nan is NaN", "a number"),
    Bad(-1.0, V, "{p}=-1.0 is negative", "0 or more"),
    Bad(HUGE, V, "{p} is an int above the largest", "less"),
    Bad(None, T, "{p}=None", "a real number"),
]

# Where a parameter means something else than under the same name elsewhere.
BY_CALL = {
    ("Band", "max_growth"): _NUMBER_ONLY,
    ("band", "max_growth"): _NUMBER_ONLY,
    ("ema", "start"): [
        Bad("last", V, "start='last' is not known", "'first'"),
        Bad(None, T, r"start=None \(NoneType\)", "'first'"),
    ],
    ("of_gradients", "rule"): [
        Bad("x", T, r"rule holds 'x' \(str\)", "a rule"),
        Bad({"a": 1.0}, T, r"rule=.* \(dict\) is not one", "a rule"),
        Bad(-1.0, V, "rule=-1.0 is negative", "0 or more"),
    ],
    ("recipes.adagc", "max_norm"): _NUMBER_ONLY,
    ("recipes.agc", "axis"): UNIT_AXIS,
    ("recipes.aggc", "groups"): [row for row in LABEL if row.value is not None],
    ("recipes.aggc", "high"): ABOVE_ZERO,
    ("recipes.aggc", "max_growth"): _NUMBER_ONLY,
    ("recipes.auto_s", "gamma"): SCALAR,
    ("recipes.sclip", "c"): SCALAR,
    ("recipes.sclip", "tau"): ABOVE_ZERO,
    ("recipes.zclip", "max_norm"): _NUMBER_ONLY,
    ("skip", "value_when"): [
        Bad("x", T, r"value_when holds 'x' \(str\)", "a rule"),
        Bad({"a": 1.0}, T, r"value_when=.* \(dict\) is not one", "a number"),
        Bad(math.nan, V, "value_when=nan is NaN", "a number"),
        Bad(-1.0, V, "value_when=-1.0 is negative", "0 or more"),
    ],
    ("suggest", "norms"): [
        Bad("x", T, "norms='x' is not accepted", "an array of numbers"),
        Bad(None, V, "norms holds 0 finite", "at least 10"),
        Bad(np.ones(3), V, "norms holds 3 finite", "at least 10"),
        Bad(-np.ones(99), V, "norms holds a negative", "norms, which are not"),
    ],
    **{
        (f"plot.{name}", "clip"): [
            Bad("x", V, "clip='x' is not one of", r"\['clip'\]"),
            Bad(3, V, "clip=3 is not one of", r"\['clip'\]"),
        ]
        for name in ("norms", "rate", "distribution", "heatmap", "runs")
    },
    ("plot.save", "history"): HISTORY,
    ("units", "axis"): UNIT_AXIS,
    ("ema", "max_norm"): _NUMBER_ONLY,
    ("zscore", "max_norm"): _NUMBER_ONLY,
    ("clip_by_value", "response"): [
        *BY_PARAMETER["response"][:-1],
        Bad(lambda n, c: 1.0, V, "Two bounds", "response='hard'", "give over="),
    ],
    ("Block", "axis"): [
        Bad("x", T, "axis='x'", "a tuple of ints"),
        Bad((-1,), T, r"axis=\(-1,\)", "counted from 0"),
        Bad((3,), V, r"axis=\(3,\) is out of range", "axes that it has"),
    ],
    ("functional.clip_by_global_norm", "norm"): [
        Bad("x", T, r"norm='x' \(str\)", "a real scalar"),
        Bad(jnp.ones(2), T, "norm=Array", "a real scalar"),
        Bad(True, T, r"norm=True \(bool\)", "a real scalar"),
        Bad(-1.0, V, "norm=-1.0 is negative", "the norm of the tree"),
    ],
}
