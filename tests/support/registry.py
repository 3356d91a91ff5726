"""List every transformation once, for the contract tests.

A test fails if a public name is in neither `ENTRIES` nor `OTHER_NAMES`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip
from tests.support import covering, oracles


# Compared by identity, so that a compiled function can be cached per entry.
@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """Hold a transformation with a threshold that clips some of `helpers.gradients`.

    Attributes:
      id: Name in test ids.
      factory: Public factory.
      threshold: Name of the threshold argument and an active value.
      oracle: Function from float64 gradients and the threshold to clipped gradients.
      kwargs: Structural arguments.
      statics: Arguments that optax.inject_hyperparams must treat as static.
      takes_flat: Whether clipping the concatenation of all leaves is the same.
      scalar_threshold: Whether the threshold is a number that can be traced, scheduled
        and vmapped; False for rules.
      slope_at_zero: Derivative at zero; 0 if the threshold itself is 0.
      scope: Kind of scope.
      response: Kind of response.
      state: Kind of state: a record of the norms, also a rule's memory, or vectors of
        a power iteration.
      roundings: Further error of an element, in eps of the largest element of its leaf,
        if it depends on all elements.
    """

    id: str
    factory: Callable[..., Any]
    threshold: tuple[str, Any]
    oracle: Callable[[Any, Any], Any]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    statics: tuple[str, ...] = ()
    takes_flat: bool = False
    scalar_threshold: bool = True
    slope_at_zero: float = 1.0
    scope: str = "leaf"
    response: str = "hard"
    state: str = "record"
    roundings: int = 0

    @property
    def of_matrices(self) -> bool:
        """Return whether it clips matrices: dense leaves with at least two numbers."""
        return self.scope == "matrices"

    @property
    def by_axis(self) -> bool:
        """Return whether shard_map requires `axis_name` to specify shardings."""
        return self.scope == "axes" or self.of_matrices

    @property
    def traits(self) -> tuple[str, ...]:
        """Return the traits for covering arrays; see tests/support/covering.py."""
        return f"scope {self.scope}", f"response {self.response}", f"state {self.state}"

    @property
    def pure(self) -> Callable[[chex.ArrayTree], Any] | None:
        """Return the pure function of the same name and arguments, or None."""
        function = getattr(optclip.functional, self.factory.__name__)
        arguments = dict([self.threshold]) | self.kwargs
        accepted = inspect.signature(function).parameters.keys()
        if not (self.scalar_threshold and arguments.keys() <= accepted):
            return None
        return functools.partial(function, **arguments)

    def make(self, threshold: Any = None, **more: Any) -> Any:
        name, active = self.threshold
        value = active if threshold is None else threshold
        return self.factory(**{name: value}, **self.kwargs, **more)

    def expected(
        self, tree: chex.ArrayTree, threshold: chex.Numeric | None = None
    ) -> chex.ArrayTree:
        """Clip a float64 tree; complex leaves by modulus, except matrices."""
        c = self.threshold[1] if threshold is None else threshold
        if self.of_matrices:
            return self.oracle(tree, c)

        def turned(x: np.ndarray, new: np.ndarray) -> np.ndarray:
            size = np.abs(x)
            return new * x / np.where(size == 0, 1, size) if np.iscomplexobj(x) else new

        sizes = jax.tree.map(lambda x: np.abs(x) if np.iscomplexobj(x) else x, tree)
        return jax.tree.map(turned, tree, self.oracle(sizes, c))


@dataclasses.dataclass(frozen=True)
class LargestSoFar:
    """Set the threshold to half the largest norm so far, as a user's rule."""

    def init(self, norm):
        return jnp.zeros_like(norm)

    def update(self, seen, memory):
        largest = jnp.maximum(seen.norm, memory)
        return 0.5 * largest, largest


@dataclasses.dataclass(frozen=True)
class TopKeys(optclip.scopes.Scope):
    """Compute one norm per top-level key, as a user's scope."""

    def blocks(self, tree):
        paths = jax.tree.leaves_with_path(tree)
        members = {str(path[0]): [] for path, _ in paths if path} or {"": []}
        for path, leaf in paths:
            members[str(path[0]) if path else ""].append(leaf)
        return {key: optclip.norms.Block(leaves) for key, leaves in members.items()}

    def spread(self, values, tree):
        def value(path, leaf):
            del leaf
            return values.get(str(path[0]) if path else "")

        return jax.tree.map_with_path(value, tree)


def square_root_capper(norm, threshold):
    """Scale by the root of the threshold over the norm, as a user's response."""
    past = norm > threshold
    safe = jnp.where(past, norm, jnp.ones_like(norm))
    return jnp.where(past, jnp.sqrt(threshold / safe), jnp.ones_like(norm))


top_key = optclip.by_path(lambda path: path.split("/")[0] or "all")


def _root(n: float, c: float) -> float:
    return math.sqrt(c / n) if n > c > 0 else float(n <= c)


def _half_of_own(tree: Any, _: Any) -> Any:
    return oracles.by_tree(tree, 0.5 * oracles.tree_norm(tree))


def _to_two(tree: Any, _: Any) -> Any:
    return oracles.by_tree(tree, 2.0)


def _together_to_two(tree: Any, _: Any) -> Any:
    # A rule receives norms above the largest float as that float.
    largest = float(jnp.finfo("float32").max)
    seen = jax.tree.map(lambda x: min(oracles.norm(x), largest), tree)
    share = min(1.0, 2.0 / max(oracles.tree_norm(seen), 2.0))

    def clip(x: np.ndarray, n: float) -> np.ndarray:
        return x * (oracles.hard(oracles.norm(x), n * share) if share < 1 else 1.0)

    return jax.tree.map(clip, tree, seen)


def _by_unit(tree: Any, c: float) -> Any:
    def clip(x: np.ndarray) -> np.ndarray:
        axis = tuple(range(x.ndim if x.ndim < 2 else x.ndim - 1))
        size = np.sqrt(np.sum(np.abs(x) ** 2, axis=axis, keepdims=True))
        return x * np.where(size > c, c / np.where(size > c, size, 1.0), 1.0)

    return jax.tree.map(clip, tree)


def _by_layer(tree: Any, c: float) -> Any:
    def clip(x: np.ndarray) -> np.ndarray:
        return np.stack([row * oracles.hard(oracles.norm(row), c) for row in x])

    return jax.tree.map(clip, tree)


def _into_band(n: float, c: float) -> float:
    low = 0.75 * c
    return c / n if n > c else low / n if 0 < n < low else 1.0


def _proportional(x: np.ndarray, c: float) -> np.ndarray:
    size = np.abs(x)
    peak = np.max(size, initial=0.0)
    return np.where(size > c, x * (c / peak if peak > 0 else 1.0), x)


def _two_bounds(tree: Any, upper: float) -> Any:
    return oracles.by_value(tree, -0.25, upper)


ENTRIES = [
    Entry(
        "value",
        optclip.clip_by_value,
        ("limit", 0.5),
        lambda tree, c: oracles.by_value(tree, -c, c),
        takes_flat=True,
        scope="element",
    ),
    Entry(
        "value-two-bounds",
        optclip.clip_by_value,
        ("upper", 0.5),
        _two_bounds,
        {"lower": -0.25},
        takes_flat=True,
        scope="element",
    ),
    Entry("norm", optclip.clip_by_norm, ("max_norm", 2.0), oracles.by_leaf),
    Entry(
        "norm-axis",
        optclip.clip_by_norm,
        ("max_norm", 2.0),
        oracles.by_first_axis,
        {"axis": (0,)},
        scope="axes",
    ),
    Entry(
        "norm-l1",
        optclip.clip_by_norm,
        ("max_norm", 4.0),
        lambda tree, c: oracles.by_leaf(tree, c, lambda x: oracles.norm(x, 1.0)),
        {"ord": 1.0},
        statics=("ord",),
    ),
    Entry(
        "average-norm",
        optclip.clip_by_average_norm,
        ("max_norm", 0.5),
        lambda tree, c: oracles.by_leaf(tree, c, oracles.average_norm),
    ),
    Entry(
        "rms",
        optclip.clip_by_rms,
        ("max_rms", 1.5),
        lambda tree, c: oracles.by_leaf(tree, c, oracles.rms),
    ),
    Entry(
        "rms-axis",
        optclip.clip_by_rms,
        ("max_rms", 1.5),
        lambda tree, c: oracles.by_first_axis(tree, c, oracles.rms),
        {"axis": (0,)},
        scope="axes",
    ),
    Entry(
        "group-norm",
        optclip.clip_by_group_norm,
        ("max_norm", 4.0),
        oracles.by_top_key,
        {"groups": top_key},
        statics=("groups",),
        scope="groups",
    ),
    Entry(
        "global-norm",
        optclip.clip_by_global_norm,
        ("max_norm", 2.0),
        oracles.by_tree,
        takes_flat=True,
        scope="tree",
    ),
    Entry(
        "global-norm-inf",
        optclip.clip_by_global_norm,
        ("max_norm", 1.0),
        lambda tree, c: oracles.by_tree(tree, c, math.inf),
        {"ord": math.inf},
        statics=("ord",),
        takes_flat=True,
        scope="tree",
    ),
    Entry(
        "global-norm-3",
        optclip.clip_by_global_norm,
        ("max_norm", 1.0),
        lambda tree, c: oracles.by_tree(tree, c, 3.0),
        {"ord": 3.0},
        statics=("ord",),
        takes_flat=True,
        scope="tree",
    ),
    Entry(
        "smooth",
        optclip.clip_by,
        ("threshold", 2.0),
        lambda tree, c: oracles.by_tree(tree, c, response=oracles.smooth),
        {"response": "smooth"},
        takes_flat=True,
        scope="tree",
        response="smooth",
    ),
    Entry(
        "normalize",
        optclip.clip_by,
        ("threshold", 2.0),
        lambda tree, c: oracles.by_tree(tree, c, response=oracles.normalized),
        {"response": "normalize"},
        takes_flat=True,
        scope="tree",
        response="normalize",
    ),
    Entry(
        "user-response",
        optclip.clip_by,
        ("threshold", 2.0),
        lambda tree, c: oracles.by_leaf(tree, c, response=_root),
        {"response": square_root_capper, "over": "leaf"},
        statics=("response",),
        response="user",
    ),
    Entry(
        "user-scope",
        optclip.clip_by,
        ("threshold", 4.0),
        oracles.by_top_key,
        {"over": TopKeys()},
        scope="user",
    ),
    Entry(
        "user-rule",
        optclip.clip_by,
        ("threshold", LargestSoFar()),
        _half_of_own,
        takes_flat=True,
        scalar_threshold=False,
        slope_at_zero=0.0,
        scope="tree",
        state="rule",
    ),
    Entry(
        "zscore-in-warm-up",
        optclip.clip_by_global_norm,
        ("max_norm", optclip.thresholds.zscore(max_norm=2.0)),
        _to_two,
        takes_flat=True,
        scalar_threshold=False,
        scope="tree",
        state="rule",
    ),
    Entry(
        "units",
        optclip.clip_by,
        ("threshold", 2.0),
        _by_unit,
        {"over": optclip.units()},
        scope="axes",
    ),
    Entry(
        "layers",
        optclip.clip_by,
        ("threshold", 2.0),
        _by_layer,
        {"over": optclip.layers("", each_leaf=True)},
        scope="axes",
    ),
    Entry(
        "band",
        optclip.clip_by,
        ("threshold", 2.0),
        lambda tree, c: oracles.by_leaf(tree, c, response=_into_band),
        {"response": optclip.responses.band(0.75), "over": "leaf"},
        statics=("response",),
        response="band",
    ),
    Entry(
        "proportional",
        optclip.clip_by_value,
        ("limit", 0.4375),
        lambda tree, c: jax.tree.map(lambda x: _proportional(x, c), tree),
        {"response": "proportional"},
        scope="element",
        response="proportional",
    ),
    Entry(
        "ema-in-warm-up",
        optclip.clip_by_norm,
        ("max_norm", optclip.thresholds.ema(max_norm=2.0)),
        _together_to_two,
        takes_flat=True,
        scalar_threshold=False,
        state="rule",
    ),
    Entry(
        "singular-value",
        optclip.clip_by_singular_value,
        ("max_value", 1.5),
        oracles.by_singular_value,
        scope="matrices",
        roundings=64,
    ),
    Entry(
        "singular-value-by-products",
        optclip.clip_by_singular_value,
        ("max_value", 1.5),
        oracles.by_singular_value,
        {"method": "newton_schulz"},
        scope="matrices",
        roundings=64,
    ),
    Entry(
        "spectral-norm",
        optclip.clip_by_spectral_norm,
        ("max_norm", 2.0),
        oracles.by_matrix,
        scope="matrices",
        roundings=16,
    ),
    Entry(
        "spectral-norm-by-iteration",
        optclip.clip_by_spectral_norm,
        ("max_norm", 2.0),
        oracles.by_matrix,
        {"method": "power_iteration", "steps": 40},
        statics=("steps",),
        scope="matrices",
        state="vectors",
        roundings=16,
    ),
]

SCALAR = [entry for entry in ENTRIES if entry.scalar_threshold]


def by_trait(entries: list[Entry] = ENTRIES, *kinds: str) -> list[Entry]:
    """Return a few entries that together have every trait; all with `--full`.

    For contracts that depend on traits and not on formulas. The tests of states,
    retraces, extra arguments and trees without arrays take all entries.

    Args:
      entries: Entries to choose from.
      *kinds: The kinds of traits that count: "scope", "response", "state"; by default
        all of them.
    """
    if covering.full:
        return entries
    counted = {
        entry: {t for t in entry.traits if not kinds or t.split()[0] in kinds}
        for entry in entries
    }
    missing = set().union(*counted.values())
    chosen = set()
    while missing:
        best = max(entries, key=lambda entry: len(missing & counted[entry]))
        chosen.add(best)
        missing -= counted[best]
    return [entry for entry in entries if entry in chosen]


# Names in `thresholds` that are protocols, or that wrap another rule.
NO_RULES = {"Rule", "Seen", "of", "of_gradients", "scaled"}
# Scope of each rule; `moment` needs elements.
OF_ELEMENTS = {"moment"}
RULES = {
    name: "element" if name in OF_ELEMENTS else "leaf"
    for name in optclip.thresholds.__all__
    if name not in NO_RULES
}


def of_rule(name: str) -> Any:
    return optclip.clip_by(getattr(optclip.thresholds, name)(), over=RULES[name])


RECIPES = {
    f"recipes.{name}": getattr(optclip.recipes, name)
    for name in optclip.recipes.__all__
}
# A wrapper around an optimizer and a clipping transformation.
WRAPPERS = {
    "skip": lambda sgd, clip: optclip.skip(
        optax.chain(clip, sgd), max_norm=optclip.thresholds.ema(), over="leaf"
    ),
    "constrain": optclip.constrain,
    "after": optclip.clip_after,
    "before": lambda sgd, clip: optclip.clip_before(clip, sgd),
    "feedback": lambda sgd, clip: optclip.recipes.uclip(clip),
    "reset": lambda sgd, clip: optclip.with_periodic_reset(clip, 2),
    "history": lambda sgd, clip: optclip.with_history(clip, 2),
}


def wrapped(name: str) -> Any:
    return WRAPPERS[name](optax.sgd(1.0), optclip.clip_by_norm(1.0))


# Every transformation by name, to be built without arguments.
FACTORIES = {
    **{entry.id: entry.make for entry in ENTRIES},
    **RECIPES,
    **{name: functools.partial(of_rule, name) for name in RULES},
    **{name: functools.partial(wrapped, name) for name in WRAPPERS},
}
# The leaves of these share a norm, a memory, or one computation of optax.
SHARING = {
    *(entry.id for entry in ENTRIES if entry.scope in ("tree", "groups", "user")),
    *RECIPES.keys()
    - {
        f"recipes.{n}"
        for n in ("adagc", "agc", "clippy", "olmo_ratio", "sclip", "uclip")
    },
    *OF_ELEMENTS,
}

# Public names that are not transformations, with the file that tests each.
OTHER_NAMES = {
    "Heads": "test_heads.py",
    "clip_attention_logits": "test_clip_attention_logits.py",
    "clip_cotangent": "test_clip_cotangent.py",
    "cotangent_probe": "test_probe.py",
    "find_heads": "test_heads.py",
    "singular_values": "test_matrices.py",
    "matrices": "test_matrices.py",
    "explain": "test_explain.py",
    "clip_after": "test_wrappers.py",
    "clip_before": "test_wrappers.py",
    "carry_over": "test_carry_over.py",
    "check_norms": "test_norm_check.py",
    "constrain": "test_constrain.py",
    "axes": "test_scopes.py",
    "by_path": "test_prefix.py",
    "functional": "test_functional.py",
    "groups": "test_masks.py",
    "layers": "test_layers.py",
    "history": "test_with_history.py",
    "keras": "test_keras_import.py",
    "with_history": "test_with_history.py",
    "metrics": "test_metrics.py",
    "norms": "test_norms.py",
    "per_example": "test_clipped_grad.py",
    "plot": "test_plot.py",
    "recipes": "test_recipes.py",
    "responses": "test_responses.py",
    "scopes": "test_bad_answers.py",
    "skip": "test_skip.py",
    "suggest": "test_suggest.py",
    "summary": "test_summary.py",
    "thresholds": "test_thresholds.py",
    "typing": "test_typing.py",
    "units": "test_scopes.py",
    "with_periodic_reset": "test_wrappers.py",
}
