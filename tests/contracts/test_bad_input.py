"""Each argument of each public callable rejects bad values with a clear error.

Every argument has a kind. `NUMBERS` has the kinds of numbers: an argument is tried with
each value outside its range. `ROUTED` has one bad value for each other kind, which must
reach its validator, `MESSAGES` the further texts of a validator, once, and `COMBINED`
those about several arguments or the state. A new
argument needs its name in the row of its kind.
"""

import inspect
import math
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import (
    functional,
    keras,
    norms,
    per_example,
    plot,
    recipes,
    responses,
    scopes,
    thresholds,
)
from optclip._responses import _responses
from tests.support import helpers
from tests.support.running_rules import UserRule

# Made by the library, abstract, or without arguments.
NOT_CALLED = {
    "per_example.ClippedGrad",
    "per_example.ExampleInfo",
    "Seen", "Response", "Rule", "Scope",
}  # fmt: skip
PREFIXED = (functional, keras, per_example, plot, recipes)
PLAIN = (optclip, norms, responses, scopes, thresholds)
PUBLIC = {
    f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module in PREFIXED
    for name in module.__all__
} | {name: getattr(module, name) for module in PLAIN for name in module.__all__}
PUBLIC = {
    name: value
    for name, value in PUBLIC.items()
    if callable(value) and name not in NOT_CALLED
}

TREE = {"a": jnp.array([3.0, 4.0]), "b": [jnp.ones((2, 3))]}
PAIRS = {"a": jnp.ones((2, 2)), "b": [jnp.ones((2, 2, 3))]}
LABELS = {"a": "x", "b": "y"}
HUGE = 10**400
ADAM, CLIP = optax.scale_by_adam(), optclip.clip_by_value(1.0)
STATE = optclip.clip_by_norm(1.0).init(TREE)
STEPPED = optclip.clip_by_norm(1.0, record="leaves")
STEPPED = helpers.quick_jit(STEPPED.update)(TREE, STEPPED.init(TREE))[1]
PROJECTIONS = {"query": jnp.ones((3, 4, 2)), "key": jnp.ones((3, 2, 2))}
LAYERS = {"attn": optclip.Heads("query", "key")}
LOGITS = {"attn": jnp.full(4, 200.0)}
HISTORY = {
    f"clip/{field}/{part}": np.ones(3)
    for field in ("norm", "threshold", "coefficient")
    for part in ("a", "b")
}
SUGGESTION = optclip.suggest(np.arange(100.0))
NORMS = {f"clip/norm/{part}": np.arange(100.0) for part in ("a", "b")}


SHARDING = NamedSharding(jax.make_mesh((1,), ("i",), (AxisType.Auto,)), P("i"))


def loss_of_one(params, example):
    return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * example


def use(result):
    """Some errors only appear at `init` and `update`."""
    if isinstance(result, optax.GradientTransformation):
        return result.update(TREE, result.init(TREE), TREE)
    return result


def clip_with(argument, **options):
    """Pass the result as this argument of `clip_by`."""
    return lambda result: use(
        optclip.clip_by(**{"threshold": 1.0, argument: result, **options})
    )


def clip_logits(tx):
    state = tx.init(PROJECTIONS)
    return tx.update(PROJECTIONS, state, PROJECTIONS, logits=LOGITS)


def clip_heads(heads):
    layers = heads if isinstance(heads, dict) else {"attn": heads}
    logits = dict.fromkeys(layers, LOGITS["attn"])
    return functional.clip_attention_logits(PROJECTIONS, logits, 1.0, layers)


def close(ax):
    plt.close(ax.figure)


# Arguments that each callable accepts, and the use of its result.
CALLS = {
    "by_path": ({"function": str}, use),
    "clip_by": ({"threshold": 1.0}, use),
    "clip_by_value": ({"lower": -1.0, "upper": 1.0}, use),
    "clip_by_norm": ({"max_norm": 1.0}, use),
    "clip_by_average_norm": ({"max_norm": 1.0}, use),
    "clip_by_rms": ({"max_rms": 1.0}, use),
    "clip_by_group_norm": ({"max_norm": 1.0, "groups": LABELS}, use),
    "clip_by_global_norm": ({"max_norm": 1.0}, use),
    "clip_by_spectral_norm": ({"max_norm": 1.0}, use),
    "clip_by_singular_value": ({"max_value": 1.0}, use),
    "axes": ({"axis": 0}, clip_with("over")),
    "groups": ({"labels": LABELS}, clip_with("over")),
    "layers": ({"paths": "a"}, clip_with("over")),
    "units": ({}, clip_with("over")),
    "singular_values": ({}, clip_with("over")),
    "matrices": ({}, clip_with("over", norm="spectral")),
    "Block": (
        {"leaves": [TREE["a"]], "axis": (0,)},
        lambda block: norms.measure([block]),
    ),
    "measure": ({"blocks": [norms.Block([TREE["a"]])]}, use),
    "band": ({}, clip_with("response")),
    "detached": ({}, clip_with("response")),
    "of": ({"reduce": "max", "rule": 1.0}, use),
    "of_gradients": ({"rule": thresholds.moment()}, use),
    "scaled": ({"rule": 1.0}, use),
    "clip_after": ({"inner": ADAM, "clip": CLIP}, use),
    "clip_before": ({"inner": ADAM, "clip": CLIP}, use),
    "carry_over": (
        {
            "tx": ADAM,
            "params": TREE,
            "state": ADAM.init(TREE),
            "new_tx": ADAM,
            "new_params": TREE,
        },
        use,
    ),
    "constrain": ({"inner": ADAM, "clip": CLIP}, use),
    "skip": ({"inner": ADAM}, use),
    "with_history": ({"inner": CLIP}, use),
    "with_periodic_reset": ({"inner": ADAM}, use),
    "metrics": ({"opt_state": STATE}, use),
    "summary": ({"opt_state": STATE}, use),
    "explain": ({"losses": lambda w: w["a"], "params": TREE, "history": HISTORY}, use),
    "suggest": ({"norms": NORMS, "part": "a"}, use),
    "check_norms": ({"opt_state": STEPPED, "grads": TREE}, use),
    "Heads": ({"query": "query", "key": "key"}, clip_heads),
    "find_heads": ({"params": PROJECTIONS, "query": "query", "key": "key"}, clip_heads),
    "clip_attention_logits": ({"max_logit": 100.0, "layers": LAYERS}, clip_logits),
    "functional.clip_attention_logits": (
        {
            "params": PROJECTIONS,
            "logits": LOGITS,
            "max_logit": 100.0,
            "layers": LAYERS,
        },
        use,
    ),
    "functional.max_attention_logit": (PROJECTIONS, use),
    "functional.global_norm": ({"tree": TREE}, use),
    "clip_cotangent": ({"tree": TREE, "max_norm": 1.0}, use),
    "per_example.clipped_grad": (
        {"loss": loss_of_one, "threshold": 1.0},
        lambda grad: grad(TREE, jnp.ones(3)),
    ),
    "per_example.norms": ({"loss": loss_of_one}, lambda f: f(TREE, jnp.ones(3))),
    "per_example.clipped_sum": ({"grads": PAIRS, "threshold": 1.0}, use),
    "per_example.aggregate": (
        {"threshold": 1.0, "normalize_by": 2.0},
        lambda tx: tx.update(PAIRS, tx.init(TREE)),
    ),
    # Checked before the import of Keras, which this environment lacks.
    "keras.clipped": ({"optimizer": "adam", "clip": CLIP}, use),
    "plot.norms": ({"history": HISTORY, "part": "a"}, close),
    "plot.rate": ({"history": HISTORY, "part": "a"}, close),
    "plot.distribution": ({"history": HISTORY, "part": "a"}, close),
    "plot.heatmap": ({"history": HISTORY}, close),
    "plot.save": ({"history": HISTORY, "path": os.devnull}, use),
    "recipes.olmo_skip": ({"use_loss": False}, use),
}
CALLS |= {
    f"functional.{name}": (arguments | {"tree": TREE}, use)
    for name, (arguments, _) in CALLS.items()
    if name.startswith("clip_by")
}


def call(name, /, **wrong):
    arguments, then = CALLS.get(name, ({}, use))
    return then(PUBLIC[name](**(arguments | wrong)))


T, V = TypeError, ValueError
# Kinds of numbers: what the error says, values outside the range, and the arguments.
# A name stands for all callables with this argument, `callable.argument` for one.
NUMBERS = {
    "a finite number of at least 0": (
        (-1.0, math.nan, math.inf),
        "absolute c count_noise eps factor gamma k low min_norm ratio relative sigma"
        " theta weight_decay previous_norm.max_norm",
    ),
    "a finite number above 0": (
        (0, math.nan, math.inf),
        "alpha expected_batch_size high init_value learning_rate normalize_by min_value"
        " power tau z per_example.QuantileThreshold.max_value",
    ),
    "a number from 0 to 1": (
        (1.5, -1.0, math.nan, HUGE),
        "b1 b2 decay max_shrink per_count q quantile rate skip_first",
    ),
    "an int from 0 to 2**31 - 1": ((-1, 2**31), "ddof grace rope step warmup"),
    "an int from 1 to 2**31 - 1": (
        (0, 2**31, HUGE),
        "block_size every head_dim max_consecutive microbatch_size most steps top window"
        " mean_plus_std.warmup zscore.warmup recipes.zclip.warmup",
    ),
    "at least 0": (
        (-1.0, math.nan),
        "limit max_gradient max_growth max_logit max_norm max_rms max_value threshold"
        " max_weight",
    ),
    "a number other than NaN": ((math.nan,), "lower upper scaled.low scaled.high"),
    "True or False": (
        (1, "x", None),
        "each_leaf has_aux keep_counts log skip_spikes strict use_loss",
    ),
}
# Values of another type, for the first five kinds: the others also take trees or flags.
NO_NUMBERS = ("x", True, [1.0])
NUMBER_OF = {
    name: kind for kind, (_, names) in NUMBERS.items() for name in names.split()
}
NO_FUNCTION = (3, T, "`{p}` must be a function of ")
UNKNOWN = ("z", V, "`{p}` must be one of ")
AXIS = (5, V, "`{p}` must name axes that each leaf has, got (5,) for the leaf 'a'")
HEAD_AXIS = ((0,), T, "`{p}` must be a single int, got (0,) (tuple)")
FLAG = (1, T, "`{p}` must be True or False, got 1 (int)")
RULE = ({"a": 1.0}, T, "`{p}` must be one number, optax schedule or rule")
ARGNUMS = (-1, V, "`{p}` must be an int of at least 0, or a tuple of these, got -1")
PROJECTION = (jnp.ones(3), V, "`{p}` must be a floating-point array of shape (..., ")
PATTERN = (3, T, "`{p}` must be the name of a module, or a pattern of paths such as")
PATH = ((), V, "`{p}` must be a path such as 'attn/query/kernel', or a tuple of paths")
# Names are arguments of all callables that have them, or `callable.argument`.
ROUTED = [
    ((1.5, T, "`{p}` must be 'median', a function of"), "clip_cotangent.relative"),
    (NO_FUNCTION, "function stacked transposed units.axis recipes.agc.axis"),
    (UNKNOWN, "clip method mode nonfinite part reduce start"),
    (AXIS, "axis"),
    (HEAD_AXIS, "Heads.axis find_heads.axis Heads.stacked find_heads.stacked"),
    (FLAG, "learn_skipped"),
    (RULE, "of_gradients.rule of.rule scaled.rule max_loss"),
    (ARGNUMS, "argnums batch_argnums"),
    (PROJECTION, "query key"),
    (PATTERN, "find_heads.query find_heads.key"),
    (PATH, "Heads.query Heads.key"),
    (("adam", T, "`{p}` must be an unbuilt Keras optimizer"), "optimizer"),
    ((3, T, "`{p}` must be a Keras model or optimizer with"), "model"),
    ((3, T, "`{p}` must be Matplotlib axes, or None"), "ax"),
    (((3,), V, "`{p}` must name axes that the leaf has, got (3,)"), "Block.axis"),
    ((3, T, "`{p}` must be a name, a tuple of names"), "axis_name"),
    (([3], T, "`blocks[0]` must be an optclip.norms.Block, got 3"), "blocks"),
    (
        (optax.adam, T, "`{p}` must be an optax transformation, got <function adam"),
        "inner tx new_tx clip_after.clip clip_before.clip constrain.clip recipes.uclip.clip keras.clipped.clip",
    ),
    ((1, T, "`{p}` for the leaf 'a' must be True or"), "mask norm_mask clip_mask"),
    (("x", T, "`{p}` must be bools that"), "functional.max_attention_logit.mask"),
    (("x", T, "`{p}` must be an optax schedule, or"), "recipes.spectra.learning_rate"),
    (
        ([jnp.ones(2), jnp.ones(3)], V, "must have first axes of the same length"),
        "grads",
    ),
    (({}, V, "`{p}` lacks ['a', 'b"), "check_norms.grads"),
    ((3, T, "A label in `groups` must be a string, or None"), "groups labels"),
    (([3], T, "`{p}` must be a list of dicts from optclip.metrics"), "history"),
    ((3, T, "`{p}` must be a function losses(params, *args)"), "losses"),
    ((3, T, "got an unexpected keyword argument '{p}'"), "args"),
    ((3, T, "`{p}` must be a dict from the name of a layer"), "layers logits"),
    (([jnp.arange(2)], T, "A leaf of a block must be a real or complex"), "leaves"),
    (("x", T, "`{p}` must be a function loss(params, example) of one"), "loss"),
    (([0, 1], T, "`{p}` must be a tuple of rows and columns"), "matrix_axes"),
    (("", T, "`{p}` must be a non-empty string, got '' (str)"), "name"),
    (("x", T, "`{p}` must be 'l1', 'l2', 'inf', 'rms', 'average', 'spectral'"), "norm"),
    ((-np.ones(99), V, "`{p}` must be at least 0, got -1.0"), "norms"),
    (((), V, "`{p}` must be an optimizer state with a record"), "opt_state"),
    (((), V, "`{p}` must be the state of an optimizer in"), "history.opt_state"),
    ((3, T, "() has no argument 'options'."), "options"),
    ((0, V, "`{p}` must be a Python or NumPy number above 0, or inf"), "ord"),
    (("all", T, "`{p}` must be 'tree', 'leaf'"), "over"),
    ((np.ones(3, bool), V, "`{p}` must be an array of 2 bools"), "padding"),
    (
        (np.ones(3), V, "`{p}` must be an array of 2 real numbers"),
        "weights",
    ),
    ((None, V, "`query` must be the name of a module"), "find_heads.params"),
    (({}, V, "`{p}` must be a tree with floating-point leaves"), "explain.params"),
    (
        ("x", T, "`{p}` must be a tree of arrays, got 'x'"),
        "carry_over.params new_params",
    ),
    ((3, V, "`{p}` must have the structure of tx.init(params)"), "carry_over.state"),
    ((None, V, "must name leaves"), "functional.clip_attention_logits.params"),
    ((3, T, "`{p}` must be a str or a pathlib.Path"), "path"),
    (
        (3, T, "`{p}` must be the path of a stack, such as 'decoder/layers', or"),
        "paths",
    ),
    (("x", T, "`{p}` must be None, or for one or more leaves an"), "Block.stacked"),
    ((3, T, "`{p}` must be a record from optclip.cotangent_probe()"), "probe"),
    (("all", T, "`{p}` must be True, False or 'leaves', got 'all'"), "record"),
    ((3, T, "`{p}` must be one of ['"), "response"),
    ((jnp.ones(2), V, "`{p}` of shape (2,) does not broadcast to one"), "scale"),
    ((["x"], T, "The leaf '0' must be an array, a number, a BCOO matrix"), "tree"),
    (
        ("x", T, "`{p}` must be a real scalar of at least 0, the norm"),
        "functional.clip_by_global_norm.use_norm",
    ),
    ((3, T, "`{p}` must be the name of an extra argument of"), "use_norm"),
]
ROUTES = {name: row for row, names in ROUTED for name in names.split()}
PLACES = [
    (name, parameter)
    for name, function in sorted(PUBLIC.items())
    for parameter in inspect.signature(function).parameters
]
BY_PATH = "Wrap a function of one leaf's path in optclip.by_path(...)."
STATIC = "With optax.inject_hyperparams,"
NEVER = "nothing would ever be clipped. Pass a longer"
# For `callable.argument`: each kind of bad value, the error and a part of its text.
MESSAGES = {
    "functional.clip_by_norm.max_norm": [
        ("x", T, "`max_norm` must be a real number or an array of real numbers, got"),
        (1j, T, "a real number or an array of real numbers, got 1j (complex)"),
        (thresholds.ema(), T, "need a state: pass them to the transformation, such"),
        (True, T, "a real number or an array of real numbers, got True (bool)"),
        ({"a": 1.0, "b": "x"}, T, "a real number or an array of real numbers, got 'x'"),
        (jax.random.key(0), T, "a real number or an array of real numbers, got"),
        (None, T, "a number or another threshold (inf clips nothing), got None"),
        (math.nan, V, "at least 0, got nan (float). 0 clips to zero, inf"),
        (jnp.float32(-3), V, "at least 0, got Array(-3., dtype=float32)"),
        (np.array([-1.0]), V, "at least 0, got array([-1.]) (ndarray)"),
        (jnp.array([1, jnp.nan]), V, "at least 0, got Array([ 1., nan]"),
        (HUGE, V, "within the range of a float, or inf, got an int beyond the largest"),
        (np.ones((7, 7)), V, "`max_norm` of shape (7, 7) does not broadcast to the"),
        ([], V, "`max_norm` must be a prefix of the tree to which it applies. Missing"),
        ([], V, "Missing: 'a', 'b/0'. Pass one value, or a tree with an entry for"),
        ({"a": 1.0, "b": [1.0, ()]}, V, "applies. Expected PyTreeDef({'a': *, 'b':"),
        ({"a": 1.0, "b": 1.0, "z": 1.0}, V, "Unexpected: 'z'. Pass one value"),
    ],
    "clip_by_norm.max_norm": [
        ("x", T, "`max_norm` must be a number, an array, an optax schedule, a rule"),
        (True, T, "for leaf and group scope a tree of these, got True (bool)"),
        ("1.0", T, "'1.0' (str). Pass a number, such as 1.0 without quotes."),
        (jax.random.key(0), T, "for leaf and group scope a tree of these, got"),
        ({"a": 1.0, "b": "x"}, T, "for leaf and group scope a tree of these, got 'x'"),
        (thresholds.zscore, T, "Call the function and pass its result, zscore(...)."),
        (SUGGESTION, T, "(Suggestion). Pass its max_norm: suggestion.max_norm."),
        (recipes.zclip, T, "Pass a rule, such as optclip.thresholds.zscore() instead"),
    ],
    "clip_by_global_norm.max_norm": [
        (recipes.zclip(), T, "not a threshold. Pass a rule, such"),
        (UserRule, T, "Pass an instance of the class, UserRule"),
    ],
    "clip_by.threshold": [
        (np.ones((7, 7)), T, "`threshold` must be one number, optax schedule or rule"),
        ([], V, "There is only one norm, so pass one number. For several"),
    ],
    "clip_by_value.lower": [
        (jnp.array([1, jnp.nan]), V, "`lower` must be a number other than NaN, got"),
        (2.0, V, "`lower` must be at most `upper`, got lower=2.0 and upper=1.0. Swap"),
        ({"a": 2.0, "b": 0.0}, V, "`lower` must be at most `upper`, got lower=2.0"),
        (np.ones((7, 7)), V, "`lower` of shape (7, 7) does not broadcast to the leaf"),
    ],
    "clip_by_value.limit": [
        (1.0, T, "must be passed, got both: limit=1.0, lower=-1.0")
    ],
    "clip_by_value.upper": [
        (-2.0, V, "`lower` must be at most `upper`, got lower=-1.0 and upper=-2.0"),
        ({"a": -2.0, "b": 1.0}, V, "`lower` must be at most `upper`, got lower=-1.0"),
    ],
    "ema.decay": [
        (None, T, "a number from 0 to 1, got None (NoneType)."),
        (ADAM, T, "Clipping goes before it: optax.chain(clipping, optimizer)."),
        (jnp.ones(3), T, "a number from 0 to 1, got Array([1., 1., 1.], dtype="),
        (abs, T, "For a schedule, build the transformation inside optax.inject_hyper"),
    ],
    "moment.decay": [(1, V, "`decay` must be below 1, got 1 (int). At 1 the")],
    "quantile.window": [
        (2.0, T, "an int from 1 to 2**31 - 1, got 2.0 (float)."),
        (jnp.ones((), int), T, "With optax.inject_hyperparams, pass static_args=("),
    ],
    "mean_plus_std.window": [(1, V, NEVER)],
    "mean_plus_std.warmup": [(129, V, NEVER)],
    "mean_plus_std.ddof": [(128, V, NEVER)],
    "functional.global_norm.ord": [
        ("inf", T, "'inf' (str). Pass a number, such as 2.0 or float('inf')."),
        (True, T, "got True (bool). None means 2."),
        (jnp.ones(()), T, "for the largest absolute value, got Array(1.,"),
        (math.nan, V, "for the largest absolute value, got nan (float)."),
        (HUGE, V, "absolute value, got an int beyond the largest float (int)."),
    ],
    "axes.axis": [
        ("x", T, "`axis` must be an int or tuple of ints, got 'x' (str). Negative"),
        (1.0, T, "an int or tuple of ints, got 1.0 (float)"),
        (True, T, "an int or tuple of ints, got True (bool)"),
        ([0], T, "an int or tuple of ints, got [0] (list). Pass axis=(0,)."),
        ((0, 1.5), T, "an int or tuple of ints, got (0, 1.5) (tuple)"),
        (None, T, "an int or tuple of ints, got None (NoneType)"),
        ((0, -1), V, "`axis` must name each axis once, got (0, -1) for the leaf 'a'"),
    ],
    "layers.paths": [
        ([3], T, "`paths` must be the path of a stack, such as 'decoder/layers', or a"),
        (["b", "b/0"], V, "must be one or more paths, none below another, got ['b'"),
    ],
    "layers.axis": [("x", T, "`axis` must be an int, got 'x' (str)")],
    "units.axis": [
        (lambda path, shape: 1.5, T, "`axis` must be an int or tuple of ints, got 1.5"),
        (lambda path, shape: 7, V, "got (7,) for the leaf 'a' of shape (2,). Exclude"),
    ],
    "Block.axis": [
        ("x", T, "`axis` must be None, or with a single leaf a tuple of ints counted"),
        ((-1,), T, "counted from 0, got (-1,) (tuple). Leaves in the block: 1."),
        ([0], T, "counted from 0, got [0] (list). Leaves in the block: 1."),
    ],
    "Block.leaves": [
        (jnp.ones(2), T, "`leaves` must be a list of arrays, got Array"),
        (["x"], T, "A leaf of a block must be a real or complex floating-point array"),
        ([jnp.ones(2)] * 2, T, "with a single leaf a tuple of ints counted"),
    ],
    "measure.blocks": [("x", T, "`blocks` must be a list of optclip.norms.Block, got")],
    "matrices.matrix_axes": [
        ((0.5, 1), T, "`matrix_axes` must be a tuple of rows and columns, each an int"),
        ((0,), V, "a tuple of ints or ..., got (0,) (tuple). Negative ones count from"),
        (
            (..., ...),
            V,
            "`matrix_axes` must be a tuple of rows and columns, each an int",
        ),
        (((0, ()), 1), T, "`matrix_axes` must be a tuple of rows and columns"),
        ((-3, -1), V, "`matrix_axes` must name axes that each leaf has, got (-3, -1)"),
    ],
    "clip_by_norm.mask": [
        ("x", T, "`mask` for the leaf 'a' must be True or False, not a traced"),
        (math.nan, T, "`mask` for the leaf 'a' must be True or False"),
        (jnp.array(True), T, "With optax.inject_hyperparams, pass static_args="),
        (["a"], V, "'b/0'. Unexpected: '0'. Pass one value, or a tree with an entry"),
        (["a"], V, "None means unclipped). optclip.by_path(...) builds such a tree"),
        (lambda tree: None, T, "of it, got None. Add the missing `return`. It is"),
        ({"a": True, "b": [None]}, T, "`mask` for the leaf 'b/0' must be True or"),
        (lambda path: True, T, "got True. It is called once, with the whole tree."),
    ],
    # A function of a path would be called once, and mask all leaves alike.
    **{
        f"clip_by.{name}": [
            (False, T, f"`{name}` must be a tree of bools, a function that returns"),
            (False, T, f"got False (bool). {STATIC} pass static_args=('{name}',)."),
            (lambda path: "a" in path, T, f"`{name}` must return a tree with the"),
            (lambda path: "a" in path, T, BY_PATH),
            (lambda path: path.endswith("s"), T, f"`{name}` failed on the tree: "),
            (lambda path: path.endswith("s"), T, "has no attribute 'endswith'"),
            (lambda path: path.endswith("s"), T, BY_PATH),
        ]
        for name in ("mask", "norm_mask", "clip_mask")
    },
    "groups.labels": [
        (None, T, "`groups` must be a tree of strings, or a function of the tree (see"),
        ({"a": 1.0, "b": "y"}, T, "A label in `groups` must be a string, or None for"),
        ({"a": "x"}, V, "`groups` must be a prefix of the tree to which it applies."),
        (lambda path: "x", T, "The function passed as `groups` must return a tree"),
        (lambda path: "x", T, BY_PATH),
    ],
    "clip_by_norm.axis_name": [
        ([3], T, "`axis_name` must be a name, a tuple of names (() for none), a"),
        ("i", V, "`axis_name` must be an axis of the enclosing shard_map, pmap or"),
    ],
    "functional.global_norm.axis_name": [
        ("i", V, "is mapped here: under jax.jit alone, omit axis_name"),
        (("i", "i"), V, "names an axis twice"),
        *(
            (axis_name, T, "`axis_name` must be a name, a tuple")
            for axis_name in (0, 1.5, {"a": 3}, [np.ones(2)], ("i", 1), SHARDING)
        ),
    ],
    "clip_by.over": [
        (None, T, "`over` must be 'tree', 'leaf', 'element', optclip.axes(...),"),
        (optclip.units, T, "Call the function and pass its result, units(...)."),
        (scopes.Scope, T, "an instance of a subclass of optclip.scopes.Scope, got"),
    ],
    "clip_by.norm": [
        (None, T, "`norm` must be 'l1', 'l2', 'inf', 'rms', 'average', 'spectral', an"),
        (True, T, "an order p, or a Norm or Spectral of optclip.norms, got True"),
        (-1.0, V, "`ord` must be a Python or NumPy number above 0, or inf for the"),
    ],
    "clip_by.response": [
        ("soft", V, "`response` must be one of ['drop', 'hard', 'normalize',"),
        (None, T, "an object with coefficient(norm, threshold), or a function of"),
        (_responses.Smooth, T, "_responses.Smooth'> (type)."),
        (jnp.ones(()), T, "got Array(1., dtype=float32) (ArrayImpl). With"),
        (jnp.tanh, T, "It cannot take (norm, threshold): too many positional"),
        (getattr, T, "attribute name must be string"),  # It has no signature.
        (lambda n, c: None, T, "The result of `response` must be a real number, or an"),
    ],
    **{
        f"{name}.response": [("soft", V, "one of ['drop', 'hard', 'normalize', 'prop")]
        for name in ("clip_by_singular_value", "functional.clip_by_singular_value")
    },
    "functional.clip_by.response": [
        (responses.band(lambda step: 0.5), V, "`response` must be a response without"),
    ],
    "functional.clip_by_global_norm.max_norm": [
        ({"a": 1.0, "b": 2.0}, V, "There is only one norm, so pass one number. For"),
    ],
    "functional.clip_by_global_norm.response": [
        (responses.band(lambda step: 0.5), V, "must be a response without schedules")
    ],
    "clip_by_spectral_norm.steps": [
        (5, V, "`steps` must be omitted with method='exact', which takes no steps")
    ],
    "clip_by_value.response": [
        (lambda n, c: 1.0, V, "or define element(x, lower, upper), got"),
        ("proportional", V, "with lower= and upper= must be 'hard', 'drop', 'norm"),
    ],
    "clip_by.nonfinite": [
        (None, T, "`nonfinite` must be one of 'propagate', 'zero', 'raise',"),
        (["zero"], T, "one of 'propagate', 'zero', 'raise', got ['zero']"),
    ],
    "clip_by.record": [(np.ones(2), T, "`record` must be True, False or 'leaves',")],
    "clip_by.name": [(3, T, "`name` must be a non-empty string, got 3 (int)")],
    "functional.clip_by.tree": [
        ("x", T, "The tree must be an array, a number, a BCOO matrix or None, got 'x'"),
        ({"a": {"b": "x"}}, T, "The leaf 'a/b' must be an array, a number, a BCOO"),
        ([object()], T, "Remove it, or filter it out with optax.masked or"),
        ([np.array(["x"])], T, "The leaf '0' must be floating-point or complex"),
    ],
    "functional.clip_by_global_norm.use_norm": [
        (jnp.ones(2), T, "`use_norm` must be a real scalar of at least 0, the norm"),
        (True, T, "or None to compute it, got True (bool)"),
        (-1.0, V, "or None to compute it, got -1.0 (float)"),
    ],
    "clip_by_global_norm.use_norm": [
        ("params", T, "`use_norm` must be the name of an extra argument of update,"),
        ("n", V, "got None (NoneType). Pass it: tx.update(updates, state, params, n="),
    ],
    "metrics.opt_state": [(None, V, "got None (NoneType). Pass the whole state of")],
    "summary.opt_state": [
        ([{"clip/norm": 1.0}], T, "a history. Pass one step, such as history[-1]"),
        ({"clip/norm": np.ones(3)}, T, "at 'clip/norm' must be a number"),
        ({"clip/norm": None}, T, "at 'clip/norm' must be a number, got None"),
    ],
    "explain.losses": [
        (lambda w: jnp.mean(w["a"]), V, "a scalar, which does not show the examples"),
        (lambda w: jnp.ones((2, 3, 4)), V, "got the shape (2, 3, 4). Reshape further"),
        (lambda w: jnp.ones((0, 3)), V, "`losses` returned no loss: its shape is (0,"),
        (lambda w: jnp.ones(3, int), T, "`losses` must return floats, got int32."),
        (lambda w: (w["a"], w), T, "Return the losses alone, without metrics or state"),
    ],
    "explain.history": [
        ({"clip/rate": [1.0]}, V, "`history` has no L2 norms of the leaves of"),
    ],
    "explain.microbatch_size": [
        (1, V, "each array in `args` must have"),
    ],
    "suggest.norms": [
        (["x"], T, "`norms` must be an array of numbers, one per step, or the dicts"),
        ({"clip/norm/a": np.ones(3)}, V, "`norms` must have at least 10 finite"),
        ([{"clip/norm/a": 1.0}, {}], V, "`norms` must have the same keys in each"),
    ],
    "suggest.clip": [(3, V, "`clip` must be one of ['clip'], got 3 (int). Pass one")],
    "skip.max_norm": [
        (-3.0, V, "0 skips each step with a gradient, inf only"),
        (jnp.ones(2), T, "one number, optax schedule or rule for the tree"),
    ],
    "skip.max_loss": [
        ("x", T, "`max_loss` must be a number, an array, an optax schedule, a rule"),
        (math.nan, V, "`max_loss` must be a number other than NaN, got nan (float)"),
    ],
    **{
        f"recipes.{name}.nonfinite": [
            ("zero", V, f"`nonfinite` must not be 'zero' for {name}"),
            ("zero", V, f"and skip such steps: optclip.skip({name}(...))"),
        ]
        for name in ("acclip", "spectra", "stable_adamw")
    },
    "recipes.spectra.learning_rate": [
        (0.1, T, "`learning_rate` must be an optax schedule, or None, got 0.1 (float)"),
        (lambda step: 0.1, V, "`learning_rate` and `warmup` must be passed together"),
    ],
    "recipes.spectra.warmup": [(5, V, "got learning_rate=None and warmup=5. Pass")],
    "Heads.query": [
        (3, T, "`query` must be a path such as 'attn/query/kernel', or a tuple of"),
        (("a", None), T, "or a tuple of paths, got ('a', None) (tuple)"),
        ("kernel", V, "must name leaves of the parameters, got 'kernel'. The paths"),
    ],
    "Heads.axis": [
        ("x", T, "`axis` must be a single int, got 'x' (str)"),
        (True, T, "`axis` must be a single int, got True (bool)"),
        (5, V, "`axis` must be an axis of 'query' of shape (3, 4, 2), got 5. Change"),
    ],
    "Heads.stacked": [
        (1, V, "`stacked` and the axis of heads must differ, got axis 1")
    ],
    "Heads.head_dim": [(5, V, "The length of axis 1 of 'query' must be a multiple of")],
    "Heads.rope": [(2, V, "Each head of 'query' must have at least 3 entries, since")],
    "find_heads.query": [("kernel", V, "that matches a leaf, got 'kernel' (str). The")],
    "functional.clip_attention_logits.layers": [
        ({}, V, "`layers` must be a dict from the name of a layer to its"),
        ({"a": "q"}, T, "`layers` at 'a' must be an optclip.Heads, got 'q' (str)"),
    ],
    "functional.clip_attention_logits.logits": [
        ({}, V, "`logits` must have the names of `layers`, ['attn'], got []."),
        ({"attn": "x"}, T, "`logits` at 'attn' must be an array of real numbers,"),
        ({"attn": np.ones(2)}, V, "must have the shape (4,) of the query heads of"),
    ],
    "functional.clip_attention_logits.max_logit": [([], V, "Missing: 'attn'. Pass")],
    "functional.max_attention_logit.query": [
        ("x", T, "`query` must be a floating-point array of shape (..., T, H, D), got"),
        (np.ones((3, 2, 2), int), T, "array of shape (..., T, H, D), got array([[[1,"),
        (jnp.ones((3, 4)), V, "got the shape (3, 4). Split the features into heads"),
        (jnp.ones((3, 3, 2)), V, "of heads of `query`, got 2 and 3. Pass (..., length"),
    ],
    "functional.max_attention_logit.mask": [
        (np.ones((3, 3)), T, "For a mask of 0 and 1 pass mask > 0; for one added"),
        (np.ones(5, bool), V, "`mask` must be bools that broadcast to (..., H, T, S)"),
    ],
    "functional.max_attention_logit.scale": [
        ("x", T, "`scale` must be a real number or an array of real numbers, got 'x'"),
        (math.nan, V, "`scale` must be a number other than NaN, got nan (float)"),
    ],
    "clip_cotangent.axis": [(5, V, "or pass axis=None for one norm per leaf")],
    "clip_cotangent.probe": [(jnp.ones(6), T, "`probe` must be a record")],
    "clip_cotangent.relative": [
        ("mean", T, "`relative` must be 'median', a function of the norms, or None"),
        (True, T, "or None, got True (bool). For another statistic, pass a function"),
        (lambda norms: None, T, "The result of `relative` must be a real number, got"),
    ],
    "per_example.clipped_grad.argnums": [
        ("x", T, "`argnums` must be an int of at least 0, or a tuple of these, got"),
        (True, T, "an int of at least 0, or a tuple of these, got True (bool)"),
        ((), V, "a tuple that is not empty, or an int, got () (tuple)"),
        ((0, 0), V, "`argnums` and `batch_argnums` must list different arguments, got"),
        (7, T, "The function must be called with at least 8 arguments to cover"),
    ],
    "per_example.clipped_grad.loss": [
        (lambda p, x: p["a"], T, "one real number for one example, got float32[2]."),
        (lambda p, x: jnp.int32(1), T, "got int32[]. Its arguments have no batch axis"),
        (lambda p, x: p["a"][0] * 1j, T, "one real number for one example, got"),
    ],
    "per_example.clipped_grad.over": [
        (None, T, "`over` must be 'tree', 'leaf' or optclip.groups(...), got None"),
        (optclip.axes(0), V, "or optclip.groups(...), got Axes(axis=(0,)) (Axes)"),
        (optclip.groups({"a": "x", "b": None}), V, "got the leaf 'b/0' without one"),
    ],
    "per_example.clipped_grad.response": [
        (3, T, "`response` must be one of ['auto_s', 'drop', 'hard', 'normalize',"),
        ("proportional", V, "or a function of these two, got 'proportional' (str)"),
    ],
    "per_example.clipped_grad.threshold": [
        (thresholds.ema(), T, "pass `threshold` of the state of per_example.Quantile"),
        (loss_of_one, T, "QuantileThreshold. In clipped_grad, the loss comes first."),
        ([], V, "`threshold` must be one number for over='tree', got [] (list). Pass"),
        (np.ones(2), V, "`threshold` must be one number for each norm, got array([1.,"),
    ],
    "per_example.clipped_grad.method": [(None, T, "`method` must be one of 'vmap',")],
    "per_example.clipped_sum.padding": [
        (jnp.ones(2), T, "`padding` must be an array of 2 bools, one per example, or"),
    ],
    "per_example.clipped_grad.max_weight": [
        (math.nan, V, "`max_weight` must be at least 0, got nan (float). inf does not"),
        (np.ones(2), V, "Pass the weights of the examples in the call, weights=."),
        (1e39, V, "`max_weight` must be from 1.18e-38 to 3.4e+38, a normal float32"),
        (10**39, V, "a normal float32, got"),
        (1e-39, V, "a normal float32, got 1e-39 (float). In float32 it would be 0 or"),
    ],
    "per_example.clipped_grad.normalize_by": [
        (1e39, V, "`normalize_by` must be from 1.18e-38 to 3.4e+38, a normal float32"),
        (1e-39, V, "a normal float32, got 1e-39 (float). In float32 it would be 0 or"),
    ],
    "per_example.QuantileThreshold.learning_rate": [
        (1e39, V, "`learning_rate` must be from 1.18e-38 to 3.4e+38, a normal float32"),
    ],
    "per_example.QuantileThreshold.expected_batch_size": [
        (1e-40, V, "`expected_batch_size` must be from 1.18e-38 to 3.4e+38, a normal"),
    ],
    "per_example.clipped_sum.weights": [
        (jnp.array([True, False]), T, "For bools, pass padding=~weights."),
        (np.ones((2, 1)), V, "one per example, or None, got array([[1.],"),
    ],
    "per_example.clipped_sum.grads": [
        ({}, V, "The arrays of a batch must have first axes of the same length, got"),
        (1.0, V, "got a scalar. Pass one row per example; of a loss, list only"),
        ([np.ones(5), np.ones(4)], V, "got 4, 5. Pass one row per example"),
        ([np.ones(2, int)], T, "so that its gradient is bounded, got the leaf '0' of"),
    ],
    "per_example.QuantileThreshold.count_noise": [
        (1.0, V, "`expected_batch_size` must be the expected number of examples with")
    ],
    "per_example.QuantileThreshold.init_value": [
        ({}, V, "`init_value` must be a number above 0, or a dict of these by label"),
        ({"a": 1.0, "b": 0}, V, "`init_value` must be a finite number above 0, got 0"),
    ],
    "per_example.QuantileThreshold.min_value": [
        (1e-40, V, "`min_value` must be from 1.18e-38 to 3.4e+38, a normal float32"),
        (1.0, V, "`init_value` must be from `min_value` to `max_value`, 1.0 to"),
    ],
    "per_example.QuantileThreshold.max_value": [
        (1e39, V, "a normal float32, got 1e+39 (float). In float32 it would be"),
        (1e-11, V, "`max_value` must be at least `min_value`, 1e-10, got 1e-11"),
    ],
    "plot.norms.history": [
        (3, T, "`history` must be a list of dicts from optclip.metrics, a dict"),
        ([], V, "`history` is empty. Pass the dicts that optclip.metrics returned"),
        ({"clip/norm": np.ones(0)}, V, "`history` has recorded no step yet. Pass the"),
        ({"clip/norm": [1.0, 2.0], "clip/rate": [1.0]}, V, "for each quantity, got 1"),
        ({"clip/norm": ["x"]}, T, "`history` at 'clip/norm' must be numbers, one per"),
        ({"loss": [1.0]}, V, "`history` has no clipping norms. Pass the dicts that"),
    ],
    "plot.norms.ax": [(np.array([None]), T, "`ax` must be Matplotlib axes, or None")],
    "plot.norms.part": [(3, V, "`part` must be one of ['a', 'b'], got 3 (int). Pass")],
    "plot.norms.clip": [(3, V, "`clip` must be one of ['clip'], got 3 (int). Pass")],
}
CASES = [(place, *row) for place, rows in MESSAGES.items() for row in rows]


def kind_of(name, parameter):
    """Return the key of an argument in the tables: its own, or that of its name."""
    own = f"{name}.{parameter}"
    return own if own in ROUTES or own in NUMBER_OF else parameter


def test_every_argument_has_a_kind():
    used = {kind_of(*place) for place in PLACES}
    assert used == ROUTES.keys() | NUMBER_OF.keys()
    assert set(CALLS) <= set(PUBLIC)


def assert_rejected(name, parameter, bad, error, words):
    wrong = {parameter: bad}
    if parameter == "limit":
        wrong |= {"lower": None, "upper": None}
    with pytest.raises(error) as caught:
        jax.eval_shape(lambda: call(name, **wrong))
    assert type(caught.value) is error
    assert words.replace("{p}", parameter) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "parameter"), [x for x in PLACES if kind_of(*x) in NUMBER_OF]
)
def test_number_outside_its_range_is_named(name, parameter):
    kind = NUMBER_OF[kind_of(name, parameter)]
    error = T if kind == "True or False" else V
    words = f"`{parameter}` must be {kind}, got "
    for bad in NUMBERS[kind][0]:
        assert_rejected(name, parameter, bad, error, words)
    if list(NUMBERS).index(kind) < 5:
        for bad in NO_NUMBERS:
            assert_rejected(name, parameter, bad, T, words)


@pytest.mark.parametrize(
    ("name", "parameter"), [x for x in PLACES if kind_of(*x) in ROUTES]
)
def test_argument_bad_value_reaches_validator(name, parameter):
    assert_rejected(name, parameter, *ROUTES[kind_of(name, parameter)])


@pytest.mark.parametrize(("place", "bad", "error", "words"), CASES)
def test_message_bad_value_names_problem_and_fix(place, bad, error, words):
    name, _, argument = place.rpartition(".")
    with pytest.raises(error) as caught:
        call(name, **{argument: bad})
    assert type(caught.value) is error
    assert words in str(caught.value)


ONES = np.ones(3, np.float32)
RECORDED = optclip.clip_by(1.0, record="leaves")
UNRECORDED = optclip.clip_by_global_norm(1.0, record=False)
BY_LAYER = optclip.clip_by(1.0, over=optclip.layers("a"), record="leaves")
OTHER_LEAVES = "same over= and record=.*'[bc]'.*carry_over"
PURE_VALUE_CALL = (
    r"by keyword: lower=, upper=.*call optclip\.functional\.clip_by_value\("
)
MEASURED = {"ord": 1, "mask": {"a": True, "b": False}, "strict": True}
# Arguments that do not fit each other or the state, and positional ones.
COMBINED = [
    (lambda: optclip.clip_by_value(), T, "got neither: .*Pass only limit"),
    (lambda: optclip.clip_by_value(1.0, lower=-1.0), T, "got both: .*Pass only limit"),
    (lambda: optclip.clip_by_value(1.0, upper=1.0), T, "got both: .*Pass only limit"),
    (
        lambda: functional.clip_by_value(ONES, limit=1.0, upper=2.0),
        *(T, "got both: .*lower=None, upper=2.0.*Pass only limit"),
    ),
    (lambda: optclip.clip_by_value(-1.0, 1.0), T, PURE_VALUE_CALL),
    (
        lambda: optclip.clip_by_value(ONES, -1.0, 1.0),
        *(T, PURE_VALUE_CALL + r"updates, lower, upper\)\.(\n|$)"),
    ),
    (lambda: recipes.aggc({"a": ONES}), T, "A label in `groups` must be a string"),
    # Positions of other libraries.
    (
        lambda: functional.clip_by_norm(ONES, 1.0, [0]),
        *(T, "Pass others by keyword: axis="),
    ),
    (
        lambda: functional.clip_by_global_norm(ONES, 1.0, 5.0),
        *(T, "Pass others by keyword: use_norm="),
    ),
    (lambda: functional.global_norm(ONES, 2), T, "Pass others by keyword: ord="),
    (
        lambda: functional.clip_by_norm([[3.0, 4.0]], 1.0, axis=0),
        *(V, r"leaf '0/0'.*pass jnp\.asarray\(list\)"),
    ),
    # A norm that the caller passes.
    (
        lambda: functional.clip_by_global_norm(ONES, 1.0, use_norm=2.0, strict=True),
        *(V, "strict=True cannot be combined with use_norm="),
    ),
    *(
        (
            lambda each=each: optclip.clip_by_global_norm(1.0, use_norm="n", **each),
            *(
                V,
                f"`use_norm` cannot be combined with {name}=.* Remove {name}=.* or use_",
            ),
        )
        for name, each in (
            *((name, {name: value}) for name, value in MEASURED.items()),
            ("record", {"record": "leaves"}),
        )
    ),
    *(
        (
            lambda bad=bad: optclip.clip_by_global_norm(1.0, use_norm="n").update(
                TREE, STATE, n=bad
            ),
            *(error, "`n` must be a real scalar of at least 0"),
        )
        for bad, error in ((-1.0, V), ("x", T), (np.ones(2), T))
    ),
    # States, and trees of another structure.
    (
        lambda: optclip.clip_by_global_norm(1.0).update(TREE, {"step": 3}),
        *(
            T,
            r"must be the ClipState .*, got .*functional.clip_by_global_norm.* record=F",
        ),
    ),
    (
        lambda: optclip.clip_by_norm(thresholds.ema()).update(TREE, None),
        *(
            T,
            r"must be a ClipState, got None .*order is tx\.update\(updates, state, params",
        ),
    ),
    (
        lambda: optclip.metrics(optax.chain(UNRECORDED, optax.adam(0.1)).init(TREE)),
        *(V, "must be an optimizer state with a record .*built with record=True"),
    ),
    (
        lambda: optclip.skip(optax.sgd(1.0), record=False),
        *(T, "`record` must be True or 'leaves'.*a state"),
    ),
    (
        lambda: optclip.clip_by_norm({"a": 1.0}, record=False).init({"b": ONES}),
        *(V, "`max_norm`"),
    ),
    *(
        (
            lambda other=other: RECORDED.update(
                other, RECORDED.init({"a": ONES, "b": ONES})
            ),
            *(V, OTHER_LEAVES),
        )
        for other in ({"a": ONES}, {"a": ONES, "b": ONES, "c": ONES})
    ),
    (
        lambda: BY_LAYER.update({"a": np.ones(8)}, BY_LAYER.init({"a": np.ones(4)})),
        *(V, r"has \d+ layers, and \d+ in the state"),
    ),
    *(
        (
            lambda name=name: optclip.clip_by(1.0, **{name: False}).init(ONES),
            *(V, f"`{name}` must be True.*single leaf"),
        )
        for name in ("mask", "norm_mask", "clip_mask")
    ),
    (
        lambda: optclip.clip_by_group_norm(
            {"x": 1.0, "y": 2.0}, optclip.by_path(lambda path: "x" if path else "y")
        ).init({"a": ONES}),
        *(V, "Unexpected: 'y'"),
    ),
    (
        lambda: use(
            optclip.clip_by_norm(
                UserRule((), lambda seen, memory: (seen.keep({"a": 1.0}), memory))
            )
        ),
        *(V, r"keep\(threshold\) .*Missing: 'b/0'"),
    ),
    # Rules and heads.
    (
        lambda: thresholds.scaled(thresholds.quantile(), low=2.0, high=1.0),
        *(V, "`low` must be at most `high`.* Swap"),
    ),
    (
        lambda: thresholds.ema(decay=1.0, start="zero"),
        *(V, "`decay` must be below 1, got 1.*everything to zero"),
    ),
    (
        lambda: optclip.Heads("q", "k", head_dim=4, rope=4),
        *(V, "`rope` must be less .* 4, got 4"),
    ),
    # Bounds of integers.
    (
        lambda: functional.clip_by_value(np.array([3, 4]), limit=1.0),
        *(T, r"`limit` must be an integer.*got 1\.0 \(float\)\. Pass int"),
    ),
    (
        lambda: functional.clip_by_value(np.array([3, 4]), lower=-np.inf, upper=1),
        *(T, "`lower` must be an integer.*or None"),
    ),
    (
        lambda: functional.clip_by_value(np.array([3, 4]), 0, jnp.float32(1)),
        *(T, "`upper` must be an integer"),
    ),
    (
        lambda: functional.clip_by_value(np.array([3, 4]), limit=[1]),
        *(T, r"`limit` must be an integer.*got \[1\] \(list\)"),
    ),
    (
        lambda: functional.clip_by_value(np.arange(3), np.array([1, 2])),
        *(V, r"`limit` of shape \(2,\) does not broadcast"),
    ),
    (
        lambda: jax.jit(lambda x: functional.clip_by_value(np.array([2**40]), x))(3),
        *(T, "`limit` must be concrete for int64.*x64"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), COMBINED)
def test_arguments_that_do_not_fit_raise(call, error, words, run):
    with pytest.raises(error, match=f"(?s){words}"):
        run(call)()


def test_validator_traced_value_is_accepted():
    """Only concrete values are checked."""

    def rule(q):
        return call("clip_by_norm", max_norm=thresholds.quantile(q, 4))[0]

    jax.eval_shape(rule, 2.0)
    with pytest.raises(V, match="`q` must be a number from 0 to 1, got 2.0"):
        rule(2.0)
