"""Optimizers, containers and a checked `carry_over`, for the laws of moved states.

Arrays of a state are filled with numbers that are all different, so that each of them
can be followed. `carried` calls `carry_over` and checks the laws of every single call:
moved and named arrays together are the whole old state, and nothing occurs twice.
"""

import collections
import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core import FrozenDict
from optax import contrib

import optclip
from optclip import thresholds
from tests.support import registry

# Leaves of one shape could be exchanged. No value of a state occurs in them.
BODY, BIAS, KERNEL, HEAD = LEAVES = [
    np.full(shape, 0.5, np.float32) for shape in ((4, 3), (3,), (4, 3), (3,))
]


def _registered(names: tuple[str, ...], **meta: Any) -> Any:
    fields = [
        *names,
        *((k, Any, dataclasses.field(default=x)) for k, x in meta.items()),
    ]
    cls = dataclasses.make_dataclass("Node", fields)
    return jax.tree_util.register_dataclass(cls, list(names), list(meta))


DENSE, MODEL = ("bias", "kernel"), ("body", "dense", "head")
Dense, Model = (collections.namedtuple("Node", names) for names in (DENSE, MODEL))
DenseData, ModelData = map(_registered, (DENSE, MODEL))
# Its leaves are in another order.
DenseReversed, ModelReversed = (_registered(names[::-1]) for names in (DENSE, MODEL))
# As Equinox modules, these hold functions beside their arrays.
DenseModule, ModelModule = (_registered(n, activation=jnp.tanh) for n in (DENSE, MODEL))
Children = _registered(("children",))
Keyless = type("Keyless", (tuple,), {})
jax.tree_util.register_pytree_node(
    Keyless, lambda node: (tuple(node), None), lambda _, children: Keyless(children)
)

# Trees with the same paths, from four leaves.
BY_NAME = {
    "dict": lambda a, b, c, d: {
        "body": a,
        "dense": {"bias": b, "kernel": c},
        "head": d,
    },
    "NamedTuple": lambda a, b, c, d: Model(a, Dense(b, c), d),
    "dataclass": lambda a, b, c, d: ModelData(a, DenseData(b, c), d),
    "reversed": lambda a, b, c, d: ModelReversed(d, DenseReversed(c, b), a),
    "module": lambda a, b, c, d: ModelModule(a, DenseModule(b, c), d),
    "FrozenDict": lambda *leaves: FrozenDict(BY_NAME["dict"](*leaves)),
    "mixed": lambda a, b, c, d: ModelData(a, {"bias": b, "kernel": c}, d),
}
BY_NUMBER = {
    "list": lambda a, b, c, d: [a, [b, c], d],
    "tuple": lambda a, b, c, d: (a, (b, c), d),
    "int keys": lambda a, b, c, d: {0: a, 1: {0: b, 1: c}, 2: d},
    "text keys": lambda a, b, c, d: {"0": a, "1": {"0": b, "1": c}, "2": d},
    "mixture": lambda a, b, c, d: [a, {0: b, 1: c}, d],
}
CONTAINERS = {
    **BY_NAME,
    **BY_NUMBER,
    "children": lambda a, b, c, d: Children((a, Children((b, c)), d)),
    "keyless": lambda a, b, c, d: {"x": Keyless((a, Keyless((b, c)))), "y": (d,)},
    "nested": lambda a, b, c, d: (Model((a,), [Dense(b, {"x": (c,)})], None), {"y": d}),
    "slashes": lambda a, b, c, d: {"x/y": a, "x": {"y": b, "y/z": c}, "x/y/z": d},
    "State": lambda *leaves: nnx.State(BY_NAME["dict"](*map(nnx.Param, leaves))),
    "one": lambda a, b, c, d: a,
}

# New arrays hold smaller numbers.
FIRST = 1000
MEMORIES = {"clip_memory", "skip_loss"}


def params(container: str) -> Any:
    return CONTAINERS[container](*LEAVES)


def by_rank(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrices" if x.ndim > 1 else "vectors", tree)


def _ema(name: str, **options: Any) -> Any:
    return optclip.clip_by_norm(thresholds.ema(0.5), name=name, **options)


SGD = functools.partial(optax.sgd, 0.1, momentum=0.9)
ADAM = functools.partial(optax.adam, 0.1)
SCHEDULE = optax.linear_schedule(0.1, 0.0, 9)
OPTAX = {
    "named_chain": lambda: optax.named_chain(("a", _ema("first")), ("b", ADAM())),
    "adam": ADAM,
    "adamw": lambda: optax.adamw(SCHEDULE),
    "lion": lambda: optax.lion(0.1),
    "sgd": SGD,
    "adafactor": lambda: optax.adafactor(0.1, 2),
    "muon": lambda: contrib.muon(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "sm3": lambda: optax.sm3(0.1),
    "adan": lambda: optax.adan(0.1),
    "lbfgs": lambda: optax.lbfgs(0.1, memory_size=3),
    "noisy sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "ademamix": lambda: contrib.ademamix(0.1),
    "prodigy": contrib.prodigy,
    "cocob": contrib.cocob,
    "dadapt_adamw": contrib.dadapt_adamw,
    "reduce_on_plateau": lambda: optax.chain(ADAM(), contrib.reduce_on_plateau()),
    "schedule_free": lambda: contrib.schedule_free(optax.rmsprop(0.1), 0.1),
    "mechanize": lambda: contrib.mechanize(ADAM()),
    "sam": lambda: contrib.sam(ADAM(), SGD()),
    "MultiSteps": lambda: optax.MultiSteps(ADAM(), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(ADAM(), 3),
    "masked": lambda: optax.masked(
        ADAM(), lambda tree: jax.tree.map(lambda x: x.size > 3, tree)
    ),
    "partition": lambda: optax.partition(
        {"matrices": ADAM(), "vectors": SGD()}, by_rank
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE),
    "chain": lambda: optax.chain(_ema("first"), SGD(), optax.trace(0.5), _ema("last")),
    "flatten": lambda: optax.flatten(ADAM()),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), ADAM()),
    "conditionally": lambda: optax.conditionally_transform(
        ADAM(), lambda step: step < 9
    ),
}
SCOPES = {
    "tree": "tree",
    "units": optclip.units(),
    "groups": optclip.groups(by_rank),
}
RULES = {
    f"{rule}, {scope}": functools.partial(
        optclip.clip_by, getattr(thresholds, rule)(), over=over
    )
    for rule, of in registry.RULES.items()
    for scope, over in (SCOPES if of == "leaf" else {of: of}).items()
}
OPTIMIZERS = OPTAX | registry.FACTORIES | RULES


def labeled(tx: Any, labels: Any) -> Any:
    """Return a partition with one transformation for all labels."""
    return optax.partition(dict.fromkeys(jax.tree.leaves(labels), tx), labels)


# The label of each leaf before and after.
LABELS = {
    "split": ("xxxx", "xxyy"),
    "joined": ("xxyy", "xxxx"),
    "exchanged": ("xxyy", "yyxx"),
    "renamed": ("xxyy", "xxzz"),
    "regrouped": ("xyyx", "xxyy"),
}

WRAPPERS = {
    "skip": lambda tx: optclip.skip(tx, max_norm=9.0),
    "learned skip": lambda tx: optclip.skip(
        tx,
        max_norm=thresholds.ema(),
        max_loss=thresholds.ema(),
        over="leaf",
        name="learned",
    ),
    "history": lambda tx: optclip.with_history(
        optax.chain(optclip.clip_by_value(9.0, name="watched"), tx), 2
    ),
    "clip_after": lambda tx: optclip.clip_after(tx, _ema("after")),
    "clip_before": lambda tx: optclip.clip_before(_ema("before"), tx),
    "constrain": lambda tx: optclip.constrain(tx, _ema("bound")),
    "feedback": lambda tx: optax.chain(optclip.recipes.uclip(_ema("carry")), tx),
    "reset": lambda tx: optclip.with_periodic_reset(tx, 2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(
        tx, lambda tree: jax.tree.map(lambda _: True, tree)
    ),
    "partition": lambda tx: optax.partition({"matrices": tx, "vectors": tx}, by_rank),
    "inject": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale_by_learning_rate(rate))
    )(0.1),
    "chain": lambda tx: optax.chain(
        optax.clip(1.0), tx, optax.add_decayed_weights(0.1)
    ),
    "named_chain": lambda tx: optax.named_chain(("a", optax.clip(1.0)), ("b", tx)),
    "schedule_free": lambda tx: contrib.schedule_free(tx, 0.1),
    "mechanize": contrib.mechanize,
    "sam": lambda tx: contrib.sam(tx, optax.sgd(0.1)),
    "conditionally": lambda tx: optax.conditionally_transform(
        tx, lambda step: step < 9
    ),
    "flatten": optax.flatten,
}


def texts(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def arrays(state: Any) -> dict[tuple[str, ...], Any]:
    """Return the arrays of a state by the texts of their paths."""
    return {texts(path): x for path, x in jax.tree.leaves_with_path(state)}


def followed(state: Any) -> dict[tuple[str, ...], np.ndarray]:
    """Return the arrays with numbers of their own: no key, flag or text."""
    return {
        path: np.asarray(x)
        for path, x in arrays(state).items()
        if x.dtype in (np.float32, np.int32, np.uint32)
        and path[-1:] != ("history_count",)
    }


def numbered(state: Any, count: int | None = None) -> Any:
    """Fill a state with consecutive numbers, or its counts with one number."""
    starts, start = {}, FIRST
    for path, x in followed(state).items():
        starts[path], start = start, start + x.size

    def fill(path: Any, x: Any) -> Any:
        place = texts(path)
        if place not in starts:
            # A history of no steps would stay empty.
            return x + 5 if "history_count" in place else x.copy()
        if count and x.ndim == 0 and MEMORIES.isdisjoint(place):
            return jnp.full_like(x, count)
        values = starts[place] + np.arange(x.size, dtype=x.dtype)
        return jnp.asarray(values.reshape(x.shape))

    return jax.tree.map_with_path(fill, state)


def owner_of(path: tuple[str, ...], names: Any) -> tuple[tuple[str, ...], str] | None:
    """Return the leaf in the path of an array, and the field in front of it."""
    for end in range(len(path), 0, -1):
        for start in range(end):
            if path[start:end] in names:
                return path[start:end], path[start - 1] if start else ""
    return None


def is_named(paths: list[tuple[str, ...]], text: str) -> bool:
    """Return whether a warning mentions one of the arrays, by a field or as a memory."""
    fields = {part for path in paths for part in path if not part.isdigit()}
    fields |= set() if MEMORIES.isdisjoint(fields) else {"memory"}
    return not fields.isdisjoint(re.findall(r"\w+", text))


def called(tx: Any, tree: Any, state: Any, new_tx: Any, new_tree: Any) -> Any:
    """Return the result of `carry_over`, and the text of its warning or an empty one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = optclip.carry_over(tx, tree, state, new_tx, new_tree)
    assert len(caught) <= 1, [str(x.message) for x in caught]
    assert all(x.category is UserWarning and x.filename == __file__ for x in caught)
    return moved, "".join(str(x.message) for x in caught)


def carried(tx: Any, tree: Any, state: Any, new_tx: Any, new_tree: Any) -> Any:
    """Call `carry_over`, and check that it moves or names a whole numbered state."""
    moved, text = called(tx, tree, state, new_tx, new_tree)
    fresh = new_tx.init(new_tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, fresh)
    # Some transformations of optax repeat an array that is new.
    ids = [id(x) for x in jax.tree.leaves(moved)]
    assert all(ids.count(id(x)) <= 1 for x in jax.tree.leaves(state))
    _check_numbers(
        *map(followed, (state, moved, fresh)), *map(arrays, (tree, new_tree)), text
    )
    return moved, text


def _check_numbers(
    old: Any, new: Any, fresh: Any, tree: Any, new_tree: Any, text: str
) -> None:
    """Check that the numbers of a state are moved to their place, or named."""
    values, before = _joined(new.values()), _joined(old.values())
    assert np.isin(values, [*before, *_joined(fresh.values())]).all()
    numbers = {
        path: _known(x)
        for path, x in old.items()
        if not re.search("record|history_rows", "/".join(path))
    }
    missing = [p for p, x in numbers.items() if not np.isin(x, values).all()]
    is_whole = all(x.size == old[path].size for path, x in numbers.items())
    # Without a loss, a warning is about what goes on with other leaves.
    assert missing or not (text and is_whole) or "continues" in text, text
    gone = tree.keys() - new_tree.keys()
    places = {x.tobytes(): path for path, x in new.items()}
    for path, x in numbers.items():
        owner = owner_of(path, tree)
        if owner[0] in gone if owner else gone or MEMORIES.isdisjoint(path):
            continue  # Entries of leaves that are gone are not in the result.
        assert path not in missing or is_named([path], text), f"{path} is lost: {text}"
        # The threshold of a loss is that of each label.
        may_repeat = not old[path].ndim or "skip_loss" in path
        is_twice = not may_repeat and np.isin(values, x).sum() > x.size
        assert not is_twice, f"{path} is in two places"
        place = places.get(old[path].tobytes())
        if owner and place and x.size:
            assert owner_of(place, new_tree) == owner, f"{path} moved to {place}"
    for path in (path for path in new if path[-1] == "count" and new[path] >= FIRST):
        beside = {(*path[:-1], field) for field in ("mu", "nu")}
        moments = [x for p, x in new.items() if p[: len(path)] in beside]
        is_alone = not np.isin(_known(_joined(moments)), before).any()
        assert not (moments and is_alone), f"{path} goes on without its moments"


def _known(x: np.ndarray) -> np.ndarray:
    """Return the numbers that `numbered` gave to an array."""
    return x[(x >= FIRST) & (x < np.inf)]


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([*map(np.ravel, arrays), np.zeros(1)])
