"""Test the laws of moved states, over optimizers, wrappers and containers.

`carried` also checks at each call that no array is lost in silence, or used twice.
"""

import collections
import functools
import itertools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optclip
from optclip import thresholds
from tests.support import carried, covering, helpers
from tests.support.carried import (
    ADAM,
    BIAS,
    BODY,
    CONTAINERS,
    LABELS,
    OPTIMIZERS,
    WRAPPERS,
    labeled,
)

TREE = carried.params("dict")
GROWN = {
    "in front": TREE | {"atom": BIAS},
    "between": TREE | {"cell": BIAS, "dense": TREE["dense"] | {"gain": BIAS}},
    "behind": TREE | {"tail": BIAS},
}
WIDER = TREE | {"dense": TREE["dense"] | {"gain": BODY[:3, :2]}}
LEARNED = optax.chain(
    optclip.clip_by_norm(thresholds.quantile(0.5, 4)), optax.adam(0.1)
)


def sampled(names, share):
    """Parametrize by each n-th name, numbered; with `--full` by all of them."""
    cases = [*enumerate([*names][:: 1 if covering.full else share])]
    ids = [name if isinstance(name, str) else "-".join(name) for _, name in cases]
    return pytest.mark.parametrize(("at", "name"), cases, ids=ids)


def some(values, at):
    """Return all values for the first optimizer, a clip and Adam; else one in turn."""
    return values if at == 0 else covering.rotated(values, at)


def split(tx, labels):
    """Return a partition of the four leaves."""
    return labeled(tx, CONTAINERS["dict"](*labels))


def there_and_back(tx, tree, other, other_tree, but=None, count=None):
    """Check that a state comes back, except for named arrays and fields like `but`."""
    state = carried.numbered(tx.init(tree), count)
    moved, there = carried.carried(tx, tree, state, other, other_tree)
    back, again = carried.carried(other, other_tree, moved, tx, tree)
    old, kept = map(carried.followed, (state, back))
    for path, x in old.items():
        is_kept = np.array_equal(kept[path], x) or (but and re.search(but, str(path)))
        # A count starts anew with the arrays beside it.
        beside = [p for p in old if x.ndim == 0 and p[: len(path) - 1] == path[:-1]]
        assert is_kept or carried.is_named([path, *beside], there + again), path


@sampled(OPTIMIZERS, 10)
def test_carry_over_same_optimizer_and_parameters_returns_state(at, name):
    tx = OPTIMIZERS[name]()
    for container in some([*CONTAINERS], at):
        tree = carried.params(container)
        state = carried.numbered(tx.init(tree))
        moved, text = carried.carried(tx, tree, state, tx, tree)
        assert not text
        assert all(map(operator.is_, *map(jax.tree.leaves, (moved, state))))


@sampled(OPTIMIZERS, 15)
@pytest.mark.parametrize("ring", ["BY_NAME", "BY_NUMBER"])
def test_carry_over_same_paths_in_other_containers_keeps_arrays(at, name, ring):
    tx, (first, *others) = OPTIMIZERS[name](), getattr(carried, ring)
    # The moments of a flat vector restart if the leaves have another order.
    others = [x for x in others if name != "flatten" or x != "reversed"]
    trees = [carried.params(x) for x in [first, *some(others, at)]]
    state = moved = carried.numbered(tx.init(trees[0]))
    for tree, other in itertools.pairwise([*trees, trees[0]]):
        moved, text = carried.carried(tx, tree, moved, tx, other)
        assert not text
        new, old = map(carried.followed, (moved, state))
        assert all(np.array_equal(new[path], old[path]) for path in new if path in old)
    assert all(map(np.array_equal, new.values(), old.values()))


@sampled(OPTIMIZERS, 10)
def test_carry_over_leaves_added_and_removed_keeps_others(at, name):
    tx = OPTIMIZERS[name]()
    for where in some([*GROWN], at):
        there_and_back(tx, TREE, tx, GROWN[where])


# No state shows the leaves of a label of noise.
@sampled([x for x in OPTIMIZERS if x != "noisy sgd"], 12)
def test_carry_over_other_labels_and_back_keeps_states(at, name):
    tx = OPTIMIZERS[name]()
    for change in some([*LABELS], at):
        before, after = (split(tx, labels) for labels in LABELS[change])
        # The record and the history of joined labels are those of one of them.
        there_and_back(before, TREE, after, TREE, "_record|history_rows", count=7)


def are_alike(tx, wrapper):
    """Return whether two states of one type could be meant after a wrapper is added."""
    states = (x.init(TREE) for x in (tx, wrapper(optax.set_to_zero())))
    inside, around = ({*re.findall(r"\w+State(?=\()", str(x))} for x in states)
    return bool(inside & around - {"MaskedState", "PartitionState", "EmptyState"})


@sampled(OPTIMIZERS, 12)
def test_carry_over_wrapper_on_and_off_keeps_state(at, name):
    tx = OPTIMIZERS[name]()
    # Nor does a flat vector, which two labels may both have.
    hidden = {"partition"} if name == "flatten" else set()
    wrappers = [x for x in WRAPPERS if not are_alike(tx, WRAPPERS[x])]
    for wrapper in some([x for x in wrappers if x not in hidden], at):
        # The norms of one flat leaf are others, so that the state of a clip starts anew.
        but = "clip_|skip_" if wrapper == "flatten" else None
        there_and_back(tx, TREE, WRAPPERS[wrapper](tx), TREE, but)


@sampled(itertools.combinations(WRAPPERS, 2), 17)
def test_carry_over_wrappers_exchanged_and_back_keeps_states(at, name):
    outer, inner = (WRAPPERS[x] for x in name)
    # A history that is moved inside loses the columns of the wrapper.
    but = "clip_|skip_|history_rows" if "flatten" in name else "history_rows"
    count = 7 if "partition" in name else None
    there_and_back(outer(inner(LEARNED)), TREE, inner(outer(LEARNED)), TREE, but, count)


@sampled(OPTIMIZERS, 18)
def test_carry_over_another_optimizer_moves_or_names(at, name):
    tx = OPTIMIZERS[name]()
    state = carried.numbered(tx.init(TREE))
    for other in covering.rotated([*OPTIMIZERS][at % 9 :: 9], 5 * at):
        try:
            carried.carried(tx, TREE, state, OPTIMIZERS[other](), TREE)
        except ValueError as error:  # It has another number of states of one type.
            if "it is unclear which continues" not in str(error):
                raise


def reading(start):
    """Return Adam after a transformation whose `init` reads one leaf."""
    State = collections.namedtuple("State", "shadow")
    first = optax.GradientTransformation(
        lambda tree: State(start(tree["body"])),
        lambda updates, state, _=None: (updates, State(state.shadow + 1)),
    )
    return optax.chain(first, ADAM())


def by_path(is_new):
    """Return Adam with a label for new leaves, by their paths and arrays."""
    labels = functools.partial(
        jax.tree.map_with_path, lambda *leaf: "new" if is_new(*leaf) else "old"
    )
    return optax.partition({"old": ADAM(), "new": ADAM()}, labels)


keystr = jax.tree_util.keystr
LABEL_FUNCTIONS = {
    "key": by_path(lambda path, _: path[-1].key == "gain"),
    "keystr": by_path(lambda path, _: keystr(path) == "['dense']['gain']"),
    "end": by_path(
        lambda path, _: keystr(path, simple=True, separator="/").endswith("dense/gain")
    ),
    "joined": by_path(lambda path, _: "/".join(k.key for k in path) == "dense/gain"),
    "length": by_path(lambda path, _: len(path) == 2),
    "ndim": by_path(lambda _, x: x.ndim == 2 and x.shape[0] == 3),
    "functions": by_path(lambda _, x: jnp.ndim(x) == 2 and np.shape(x) == (3, 2)),
}
CLIP = optclip.clip_by_norm(thresholds.ema(), record="leaves")
TWO_CLIPS = optax.chain(CLIP, ADAM(), CLIP)
LOOK, LOOK_SKIP = (optax.lookahead(x, 5, 0.5) for x in (LEARNED, optclip.skip(LEARNED)))
BOTH = optax.LookaheadParams(TREE, TREE)
UNUSED = optax.partition({"x": ADAM(), "y": ADAM()}, CONTAINERS["dict"](*"xxxx"))
SHAPE, PRODUCT = reading(lambda x: jnp.zeros(x.shape)), reading(lambda x: x * 2)


def alike(tx, other):
    return tx, TREE, other, TREE


SWITCHES = {
    "clip_after": alike(optax.chain(ADAM(), CLIP), optclip.clip_after(ADAM(), CLIP)),
    "schedule": alike(OPTIMIZERS["adamw"](), OPTIMIZERS["inject"]()),
    "named_chain renamed": alike(
        *(optax.named_chain((x, CLIP), ("adam", ADAM())) for x in ("one", "two"))
    ),
    "lookahead": (LEARNED, TREE, LOOK, BOTH),
    "in lookahead": (LOOK, BOTH, LOOK_SKIP, BOTH),
    "in MultiSteps": alike(
        *(
            optax.MultiSteps(tx, 2).gradient_transformation()
            for tx in (LEARNED, optclip.skip(LEARNED))
        )
    ),
    "label in wrapper": alike(
        optclip.skip(split(ADAM(), "xxxx")),
        optclip.with_history(optclip.skip(split(ADAM(), "yyxx")), 4),
    ),
    "unused label": alike(ADAM(), UNUSED),
    "unused label in use": alike(split(ADAM(), "xxyy"), UNUSED),
    "unused labels of muon": alike(
        OPTIMIZERS["muon"](), split(OPTIMIZERS["muon"](), "xxyy")
    ),
    "two clips": alike(TWO_CLIPS, optclip.with_history(TWO_CLIPS, 4)),
    "two clips in labels": alike(split(TWO_CLIPS, "xxxx"), split(TWO_CLIPS, "xxyy")),
    "shape in init": alike(SHAPE, optclip.skip(SHAPE)),
    "product in init": alike(PRODUCT, optclip.skip(PRODUCT)),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_carry_over_switch_and_back_keeps_state(name):
    there_and_back(*SWITCHES[name], "_record")


@pytest.mark.parametrize("name", LABEL_FUNCTIONS)
def test_carry_over_new_label_of_function_starts_at_zero(name):
    there_and_back(ADAM(), TREE, LABEL_FUNCTIONS[name], WIDER)


GLOBAL = optclip.clip_by_global_norm(thresholds.quantile(0.5, 4), record="leaves")
CHAIN = optax.chain(GLOBAL, ADAM())
ONE_LABEL, TWO_LABELS = (
    optax.chain(GLOBAL, split(ADAM(), labels)) for labels in ("xxxx", "xxyy")
)
# For the path of an array in the new state, the same place in the old state: by hand,
# without addresses.
CONTINUED = {
    "wrapper": (
        *(LEARNED, TREE, optclip.skip(LEARNED, max_norm=100.0), TREE),
        lambda path: path[1:] if path[0] == "skip_inner" else (),
    ),
    "leaf": (
        *(CHAIN, TREE, CHAIN, GROWN["behind"]),
        lambda path: path,
    ),
    "label": (
        *(ONE_LABEL, TREE, TWO_LABELS, TREE),
        lambda path: tuple("x" if key == "y" else key for key in path),
    ),
}


def trained(tx, tree):
    """Return a function that compiles once and runs 20 updates from a state."""
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: np.float32(rng.normal(size=(20, *x.shape))), tree)

    def step(state, grad):
        return tx.update(grad, state, tree)[::-1]

    return helpers.quick_jit(lambda state: jax.lax.scan(step, state, grads))


@pytest.mark.parametrize("name", CONTINUED)
def test_carry_over_continues_as_if_never_stopped(name):
    tx, tree, new_tx, new_tree, place = CONTINUED[name]
    state, _ = trained(tx, tree)(tx.init(tree))
    moved, _ = carried.called(tx, tree, state, new_tx, new_tree)
    old = carried.arrays(state)
    reference = jax.tree.map_with_path(
        lambda path, x: old.get(place(carried.texts(path)), x), new_tx.init(new_tree)
    )
    run = trained(new_tx, new_tree)
    helpers.assert_identical(run(moved), run(reference))


# The state of `nnx.Optimizer`, whose arrays are in variables.

OF_LEAVES = optclip.clip_by_norm(optclip.thresholds.quantile(0.5, 8), record="leaves")
LEARNED_ADAM = optax.chain(OF_LEAVES, optax.adam(0.1))
WRAPPED = optclip.with_history(optclip.skip(LEARNED_ADAM, max_norm=1e6), steps=4)
WRT = nnx.Any(nnx.Param, nnx.LoRAParam)


class Model(nnx.Module):
    def __init__(self, adapter):
        rngs = nnx.Rngs(0)
        split = nnx.with_metadata(nnx.initializers.ones, note="of the kernel")
        first = nnx.Linear(2, 3, kernel_init=split, rngs=rngs)
        self.layers = nnx.data((first, nnx.Linear(3, 2, rngs=rngs)))
        self.adapter = nnx.LoRA(2, 2, 3, rngs=rngs) if adapter else None

    def __call__(self, x):
        return self.layers[1](self.layers[0](x) + self.adapter(x))


def params_of(model):
    return nnx.state(model, WRT)


def pure(model):
    return nnx.to_pure_dict(params_of(model))


@pytest.mark.parametrize("params", [params_of, pure])
@pytest.mark.parametrize(
    ("tx", "new_tx"),
    # No array in the state of momentum tells the type of a count's variable.
    [
        (LEARNED_ADAM, LEARNED_ADAM),
        (LEARNED_ADAM, WRAPPED),
        (optax.sgd(0.1, 0.9), LEARNED_ADAM),
    ],
    ids=["same", "wrapped", "from momentum"],
)
def test_carry_over_state_of_nnx_optimizer_continues(tx, new_tx, params):
    model, larger = Model(adapter=False), Model(adapter=True)
    like, other = (
        nnx.Optimizer(*each, wrt=WRT) for each in ((model, tx), (larger, new_tx))
    )
    bare = carried.numbered(tx.init(pure(model)))
    boxed = jax.tree.unflatten(
        jax.tree.structure(like.opt_state), jax.tree.leaves(bare)
    )
    expected, text = carried.carried(tx, pure(model), bare, new_tx, pure(larger))
    for state in (bare, boxed):
        trees = params(model), state, new_tx, params(larger)
        moved, same = carried.called(tx, *trees)
        helpers.assert_identical(*map(jax.tree.leaves, (moved, expected)))
        assert same == text
    nnx.update(other.opt_state, nnx.state(moved))
    if params is params_of:
        structures = [jax.tree.structure(x) for x in (moved, other.opt_state)]
        assert structures[0] == structures[1] or tx is not LEARNED_ADAM
        other.update(larger, nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(larger))
        steps = [optclip.metrics(x)["clip/steps"] for x in (moved, other.opt_state)]
        assert steps[1] == steps[0] + 1
