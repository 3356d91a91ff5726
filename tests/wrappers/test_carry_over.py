"""Test which numbers of a state move to other leaves and other optimizers.

A warning names each number that starts again; `carry` compares it with the words given.
"""

import collections
import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import _thresholds, clip_by_norm, constrain
from optclip import thresholds as T
from tests.support import helpers

SHAPES = {"a": (2, 3), "b": (3,), "c": (3, 2), "d": (3,), "e": ()}
ADAM, FROZEN = optax.adam(0.1), optax.set_to_zero()
MEDIAN, LARGEST = T.quantile(0.5, 4), T.quantile(1.0, 4)
CLIP = clip_by_norm(LARGEST, record="leaves")
CHAIN = optax.chain(CLIP, ADAM)
skip = functools.partial(optclip.skip, max_norm=LARGEST)
history = functools.partial(optclip.with_history, steps=4)


def clip(rule=LARGEST, **options):
    return optclip.clip_by(rule, **options)


def ones(names, **others):
    """Return leaves of ones; "a" and "b" together have the norm 3."""
    return {k: np.ones(SHAPES[k], np.float32) for k in names} | others


def scaled(tree, size):
    return jax.tree.map(lambda x: np.float32(size) * x, tree)


@functools.cache
def compiled(tx):
    return helpers.quick_jit(optax.with_extra_args_support(tx).update)


def after(tx, tree, steps=5, *, state=None, size=1.0):
    """Return the state after steps whose gradients are 1 to 1.2 times the parameters."""
    state = tx.init(tree) if state is None else state
    for step in range(steps):
        grads = scaled(getattr(tree, "fast", tree), size + 0.1 * size * (step % 3))
        _, state = compiled(tx)(grads, state, tree, value=np.float32(1))
    return state


def carry(tx, tree, state, new_tx, new_tree, *words):
    """Move a state with one warning that has all words; without words, with none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = optclip.carry_over(tx, tree, state, new_tx, new_tree)
    text = "\n".join(str(x.message) for x in caught)
    assert [x.filename for x in caught] == [__file__] * bool(words), text
    assert not [word for word in words if not re.search(word, text)], text
    helpers.assert_same_types(moved, new_tx.init(new_tree))
    assert len(set(map(id, jax.tree.leaves(moved)))) == len(jax.tree.leaves(moved))
    return moved


# The parts of a state that keep their address, whatever is around them.
ROLE = (
    r"/((?:mu|nu|rng_key|acc_grads|shadow|clip_\w+|skip_(?!inner)\w+)\b.*"
    r"|(?<=\d/)count$)"
)


def roles(state):
    """Return the arrays of a state by their path below labels and wrappers."""
    found = collections.defaultdict(list)
    for path, x in jax.tree.leaves_with_path(state):
        for role in re.findall(ROLE, "/" + text_of(path)):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            found[role].append(np.asarray(jax.random.key_data(x) if is_key else x))
    return found


def assert_kept(state, moved):
    """Compare the arrays that both states have, up to a cast."""
    old, new = roles(state), roles(moved)
    for role in (shared := old.keys() & new.keys()):
        for x in old[role]:
            assert any(np.array_equal(x.astype(y.dtype), y) for y in new[role]), role
    assert len(shared) > 1


def counts(state):
    return [int(x) for _, x in optax.tree.get_all_with_path(state, "count")]


def split(part=ADAM, **labels):
    """Return a partition with one transformation for each label."""
    return optax.partition(dict.fromkeys(labels.values(), part), labels)


def reading(start):
    """Return Adam after a transformation whose `init` reads one leaf."""
    State = collections.namedtuple("State", "shadow")
    first = optax.GradientTransformation(
        lambda tree: State(start(tree["a"])),
        lambda updates, state, _=None: (updates, State(state.shadow + 1)),
    )
    return optax.chain(first, ADAM)


def switched(tx, other, word=""):
    return tx, AB, other, AB, word


AB, ABC = ones("ab"), ones("abc")
X, Y = AB.values()
Pair = collections.namedtuple("Pair", "a b")
Module = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Module", "ab"))
NOISY = optax.chain(optax.add_noise(0.1, 0.5, 0), ADAM)
TWICE = optax.chain(CLIP, ADAM, CLIP)
SHAPE, PRODUCT = reading(lambda x: jnp.zeros(x.shape)), reading(lambda x: x * 2)
SAM = optax.GradientTransformation(*optax.contrib.sam(CHAIN, optax.sgd(0.1)))
XX, XY, YX, YY = (split(a=a, b=b) for a in "xy" for b in "xy")
LOOK, LOOK_SKIP = (optax.lookahead(x, 5, 0.5) for x in (CHAIN, optclip.skip(CHAIN)))
MULTI, MULTI_SKIP = (
    optax.MultiSteps(x, 2).gradient_transformation()
    for x in (CHAIN, optclip.skip(CHAIN))
)
ONE, TWO = (optax.named_chain((x, CLIP), ("adam", ADAM)) for x in ("one", "two"))
EMPTY = optax.partition({"x": ADAM, "y": ADAM}, {"a": "x", "b": "x"})
MUON = optax.contrib.muon(0.1)
BOTH = optax.LookaheadParams(AB, AB)
# Two optimizers with their leaves, and the word of the warning on the way back.
PAIRS = {
    "tuple": (CHAIN, (X, (Y, 2 * X)), CHAIN, (X, (Y, 2 * X)), ""),
    "tuple in dict": (CHAIN, {"l": (X, Y)}, CHAIN, {"l": [X, Y]}, ""),
    "list to tuple": (CHAIN, [X, Y], CHAIN, (X, Y), ""),
    "tuple to text keys": (CHAIN, (X, Y), CHAIN, {"0": X, "1": Y}, ""),
    "int to text keys": (CHAIN, {0: X, 1: Y}, CHAIN, {"0": X, "1": Y}, ""),
    "named tuple": (CHAIN, AB, CHAIN, Pair(X, Y), ""),
    "dataclass": (CHAIN, AB, CHAIN, Module(X, Y), ""),
    "label split, joined": switched(XX, XY),
    "labels exchanged": switched(XY, YX),
    "label renamed": switched(XX, YY),
    "labels": switched(ADAM, XY),
    "label in wrapper": switched(optclip.skip(XX), history(optclip.skip(YX))),
    "named_chain renamed": switched(ONE, TWO),
    "skip": switched(CHAIN, optclip.skip(CHAIN, max_norm=9.0)),
    "learned skip": switched(CHAIN, skip(CHAIN), "skip"),
    "learned loss": switched(CHAIN, optclip.skip(CHAIN, max_loss=LARGEST), "skip"),
    "history": switched(CHAIN, history(CHAIN)),
    "feedback": switched(CHAIN, optax.chain(optclip.recipes.uclip(CLIP), ADAM)),
    "MultiSteps": switched(CHAIN, MULTI, "acc_grads"),  # In the middle of a step.
    "in MultiSteps": switched(MULTI, MULTI_SKIP),
    "apply_if_finite": switched(CHAIN, optax.apply_if_finite(CHAIN, 3)),
    "masked": switched(CHAIN, optax.masked(CHAIN, {"a": True, "b": True})),
    "clip": switched(CHAIN, optax.chain(optclip.clip_by_value(9.0, name="new"), CHAIN)),
    "named_chain": switched(CHAIN, ONE),
    "clip_after": switched(optax.chain(ADAM, CLIP), optclip.clip_after(ADAM, CLIP)),
    "schedule_free": switched(CHAIN, optax.contrib.schedule_free(CHAIN, 0.1), r"\bz\b"),
    "mechanize": switched(CHAIN, optax.contrib.mechanize(CHAIN), "x0"),
    "sam": switched(CHAIN, SAM, "cache"),
    "lookahead": (CHAIN, AB, LOOK, BOTH, ""),
    "in lookahead": (LOOK, BOTH, LOOK_SKIP, BOTH, ""),
    "history, skip": switched(history(skip(CHAIN)), skip(history(CHAIN))),
    "constrain, skip": switched(
        constrain(skip(ADAM), CLIP), skip(constrain(ADAM, CLIP))
    ),
    "empty label": switched(ADAM, EMPTY),
    "empty label used": switched(EMPTY, XY),
    "empty labels of muon": switched(MUON, split(MUON, a="x", b="y")),
    "two clips in labels": switched(
        split(TWICE, a="x", b="x"), split(TWICE, a="x", b="y")
    ),
    "key of noise": switched(NOISY, optclip.skip(NOISY)),
    "two clips": switched(TWICE, history(TWICE)),
    "shape in init": switched(SHAPE, optclip.skip(SHAPE)),
    "product in init": switched(PRODUCT, optclip.skip(PRODUCT)),
    "dtype": switched(optax.adam(0.1, mu_dtype=jnp.bfloat16), ADAM),
}


@pytest.mark.parametrize("name", PAIRS)
def test_carry_over_other_surroundings_keep_state(name):
    tx, tree, other, new_tree, word = PAIRS[name]
    there, back = (tx, tree, other, new_tree), (other, new_tree, tx, tree)
    for (tx, tree, *new), words in ((there, []), (back, [word] * bool(word))):
        state = after(tx, tree)
        moved = carry(tx, tree, state, *new, *words)
        assert_kept(state, moved)
        old, new = ({*map(int, roles(x)["count"])} for x in (state, moved))
        assert old == new or "empty" in name


def by_path(is_new):
    def label(path, x):
        return "new" if is_new(path, x) else "old"

    return functools.partial(jax.tree.map_with_path, label)


def by_keys(tree):
    return {
        k: by_keys(x) if isinstance(x, dict) else "new" if k == "c" else "old"
        for k, x in tree.items()
    }


keystr = jax.tree_util.keystr
text_of = functools.partial(keystr, simple=True, separator="/")
LABEL_FUNCTIONS = {
    "key": by_path(lambda path, _: path[-1].key == "c"),
    "keystr": by_path(lambda path, _: keystr(path) == "['m']['c']"),
    "end": by_path(lambda path, _: text_of(path).endswith("m/c")),
    "joined": by_path(lambda path, _: "/".join(k.key for k in path) == "m/c"),
    "length": by_path(lambda path, _: len(path) == 2),
    "ndim": by_path(lambda _, x: x.ndim == 2 and x.shape[0] == 3),
    "functions": by_path(lambda _, x: jnp.ndim(x) == 2 and np.shape(x) == (3, 2)),
    "dicts": by_keys,
}


@pytest.mark.parametrize("name", LABEL_FUNCTIONS)
def test_carry_over_new_label_of_function_starts_at_zero(name):
    new_tx = optax.partition({"old": ADAM, "new": ADAM}, LABEL_FUNCTIONS[name])
    state, grown = after(ADAM, AB), ones("ab", m=ones("c"))
    moved = carry(ADAM, AB, state, new_tx, grown)
    assert_kept(state, moved)
    assert counts(moved) == [0, 5]  # In the order of the labels.
    back = carry(new_tx, grown, after(new_tx, grown, state=moved), ADAM, AB)
    assert counts(back) == [10]


FLAT, ADAMS = optax.flatten(ADAM), optax.chain(*[optax.scale_by_adam()] * 2)
LORA = optax.partition({"on": ADAM, "off": FROZEN}, {"a": "off", "b": "off", "c": "on"})
HEAD = optax.partition({"on": CHAIN, "off": FROZEN}, {"a": "off", "b": "on"})
LARGER = ones("b", a=np.ones((4, 3), np.float32))
MOMENTS = r"\bmu\b.*\ba\b", r"\bnu\b.*\ba\b"
# Old and new optimizer and leaves, the new count, and words of the warning.
ANEW = {
    "frozen base": (ADAM, AB, LORA, ABC, 0, MOMENTS),
    "frozen labels": (XY, AB, LORA, ABC, 0, MOMENTS),
    "flatten, leaves of equal size": (FLAT, AB, FLAT, ones("bc"), 0, ["mu"]),
    "flatten, more leaves": (FLAT, AB, FLAT, ABC, 0, ["mu"]),
    "flatten on": (ADAM, AB, FLAT, AB, 0, MOMENTS),
    "flatten off": (FLAT, AB, ADAM, AB, 0, ["mu"]),
    "unfrozen into running label": (HEAD, AB, CHAIN, AB, 5, [r"\ba\b", "6.6"]),
    "larger embedding": (CHAIN, AB, CHAIN, LARGER, 5, [*MOMENTS, "clip", "6.6"]),
}


@pytest.mark.parametrize("name", ANEW)
def test_carry_over_moments_without_counterpart_start_at_zero(name):
    tx, tree, *new, count, words = ANEW[name]
    state = after(tx, tree)
    moved = carry(tx, tree, state, *new, *words)
    assert counts(moved) == [count]
    for role, x in roles(moved).items():
        if role[:2] in ("mu", "nu"):
            is_kept = count and role[-1] == "b"
            np.testing.assert_array_equal(
                x, roles(state)[role] if is_kept else [0 * x[0]]
            )


def test_carry_over_joined_labels_take_count_of_most_elements():
    one, tree = split(a="x"), ones("a")
    state = after(XY, AB, 3, state=carry(one, tree, after(one, tree), XY, AB))
    assert counts(state) == [8, 3]
    # The leaf "a" has six elements, "b" three.
    assert counts(carry(XY, AB, state, XX, AB, "count")) == [8]


def test_carry_over_new_leaf_beside_adam_is_named_with_remedy():
    state = optax.tree.set(after(ADAM, AB), count=np.int32(5000))
    remedy, words = split(a="old", b="old", c="new"), (r"\bc\b", "6.6", "partition")
    for tx, said, size in ((ADAM, words, 0.315), (remedy, (), 0.1)):
        updates, _ = compiled(tx)(ABC, carry(ADAM, AB, state, tx, ABC, *said), ABC)
        np.testing.assert_allclose(updates["c"], -size, rtol=0.01)


def test_carry_over_injected_schedule_keeps_count():
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    pair = optax.adamw(schedule), optax.inject_hyperparams(optax.adamw)(schedule)
    for tx, new_tx in (pair, pair[::-1]):
        updates, _ = compiled(new_tx)(AB, carry(tx, AB, after(tx, AB), new_tx, AB), AB)
        np.testing.assert_allclose(updates["a"], -0.5, rtol=0.05)


def test_carry_over_casts_counts_of_floats():
    """An average of states, or a cast, makes floats of their counts."""
    state = jax.tree.map(np.float32, after(CHAIN, AB))
    assert_kept(state, carry(CHAIN, AB, state, optclip.skip(CHAIN), AB))


def thresholds_after(tx, state, tree):
    """Return the thresholds of a step with gradients of 0.1."""
    metrics = optclip.metrics(after(tx, tree, 1, state=state, size=0.1))
    return {k.split("/")[-1]: float(metrics[k]) for k in metrics if "/threshold" in k}


A, B = (1.2 * n**0.5 for n in (6, 3))
SPLIT_CLIP, LEAVES, WHOLE = (
    split(CLIP, a="x", b="y"),
    {"a": A, "b": B},
    {"threshold": 3.6},
)
XY_GROUPS, YX_GROUPS, YZ_GROUPS = (
    optclip.clip_by_group_norm(LARGEST, {"a": x, "b": y}, record="leaves")
    for x, y in ("xy", "yx", "yz")
)
# Old and new clipping, the thresholds of a small step (None: those of a state that starts
# again), whether the memory is named, and old and new leaves, if not "a" and "b".
THRESHOLDS = {
    "number of rule": (clip(), clip(T.quantile(0.99, 4)), WHOLE, False),
    "record": (clip(record=False), clip(), WHOLE, False),
    "record of leaves": (clip(), clip(record="leaves"), WHOLE, False),
    "response": (clip(), clip(response="smooth", eps=1e-6), WHOLE, False),
    "groups renamed": (XY_GROUPS, YZ_GROUPS, {"y": A, "z": B}, False),
    "groups exchanged": (XY_GROUPS, YX_GROUPS, {"y": A, "x": B}, False),
    "labels joined": (SPLIT_CLIP, CLIP, LEAVES, False),
    "labels split": (CLIP, SPLIT_CLIP, LEAVES, False),
    "l2 to rms": (clip(), clip(norm="rms"), None, True),
    "l2 to average": (clip(), clip(norm="average"), None, True),
    "l2 to l1": (clip(), clip(norm="l1"), None, True),
    "l2 to inf": (clip(), clip(norm="inf"), None, True),
    "rms to l2": (clip(norm="rms"), clip(), None, True),
    "leaf to rms": (CLIP, optclip.clip_by_rms(LARGEST), None, True),
    "leaf to tree": (CLIP, clip(), None, True),
    "window": (clip(), clip(T.quantile(1.0, 8)), None, True),
    "rule": (clip(), clip(T.previous_norm()), None, True),
    "into skip": (clip(), skip(optax.identity()), None, True),
    "fixed": (clip(), clip(9.0), None, True),
    "adapter added": (clip(), clip(), WHOLE, True, "ab", "abe"),
    "leaf removed": (clip(), clip(), WHOLE, True, "ab", "a"),
    "half of elements": (clip(), clip(), {"threshold": B}, True, "b", "bd"),
    "less than half": (clip(), clip(), None, True, "b", "bde"),
    "body unfrozen": (clip(), clip(), None, True, "b", "ab"),
    "body replaced": (clip(), clip(), None, True, "ab", "bc"),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_carry_over_threshold_moves_with_its_norm_only(name):
    tx, new_tx, expected, is_named, *leaves = THRESHOLDS[name]
    tree, new = map(ones, leaves or ("ab", "ab"))
    moved = carry(tx, tree, after(tx, tree), new_tx, new, *["clip"] * is_named)
    expected = expected or thresholds_after(new_tx, new_tx.init(new), new)
    assert thresholds_after(new_tx, moved, new) == pytest.approx(expected, rel=0.02)


def test_carry_over_unfrozen_body_is_skipped_in_few_steps():
    rule = T.scaled(T.quantile(0.5), 10.0)
    tx = optclip.skip(optax.sgd(0.1), max_norm=rule, max_consecutive=20)
    head = {"head": np.ones((50, 2), np.float32)}
    model = head | {"body": np.ones((400, 50), np.float32)}
    moved = carry(tx, head, after(tx, head, 60), tx, model, "skip")
    # With the memory of the head, 23 steps are skipped.
    assert optclip.metrics(after(tx, model, 40, state=moved))["skip/skipped"] <= 3


def test_carry_over_second_moment_warms_up_for_new_leaf():
    tx = optclip.clip_by_value(_thresholds.second_moment(1.0))
    state = carry(tx, AB, after(tx, AB, 25), tx, ABC)
    for size in (0.01, 1.0, 1.0):
        updates, state = compiled(tx)(grads := scaled(ABC, size), state, ABC)
        np.testing.assert_array_equal(updates["c"], grads["c"])
    assert np.all(updates["a"] < 0.5)  # Past its own warm-up.


def test_carry_over_two_clips_of_one_name_ask_for_names():
    one = optax.chain(optax.scale(1e-3), clip())
    two = optax.chain(clip(), one)
    three = optax.chain(clip(), two)
    for tx, new_tx in ((two, one), (one, two), (two, three), (ADAMS, ADAM)):
        with pytest.raises(ValueError, match="name="):
            optclip.carry_over(tx, AB, after(tx, AB), new_tx, AB)
    rest = optax.chain(optax.scale(1e-3), clip(name="updates"))
    named = optax.chain(clip(name="gradients"), rest)
    state = jax.tree.unflatten(
        jax.tree.structure(named.init(AB)), jax.tree.leaves(after(two, AB))
    )
    moved = carry(named, AB, state, rest, AB, "gradients")
    assert thresholds_after(rest, moved, AB)["threshold"] == pytest.approx(3.6e-3)
    labeled = optax.named_chain(("gradients", clip()), ("updates", one))
    rest = optax.named_chain(("updates", one))
    moved = carry(labeled, AB, after(labeled, AB), rest, AB, "clip")
    assert thresholds_after(rest, moved, AB)["threshold"] == pytest.approx(3.6e-3)


def test_carry_over_keeps_state_in_host_memory():
    tx, device = history(CHAIN), jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    state = after(tx, AB)
    moved = carry(tx, AB, jax.device_put(state, host), tx, ABC, "6.6")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moved)} == {"pinned_host"}
    helpers.assert_identical(moved, carry(tx, AB, state, tx, ABC, "6.6"))


def test_carry_over_rejects_two_leaves_of_one_path():
    """JAX sorts the keys of a dict, so that only an ordered one mixes their types."""
    same = collections.OrderedDict([(0, X), ("0", X)])
    with pytest.raises(ValueError, match="0"):
        optclip.carry_over(ADAM, same, ADAM.init(same), ADAM, same)


LEAF = {
    "sm3": optax.sm3(0.1),
    "quantile": clip_by_norm(MEDIAN, record="leaves"),
    "ema": clip_by_norm(T.ema(1.0, 0.5, 2), record="leaves"),
    "zscore": clip_by_norm(T.zscore(1.0, 0.5, 2), record="leaves"),
    "slices": optclip.clip_by(MEDIAN, over=optclip.axes(0)),
    "elements": optclip.clip_by_value(_thresholds.second_moment(1.0, warmup=1)),
    "statistic": optclip.clip_by_value(T.of("max", MEDIAN)),
    "spectral": optclip.clip_by_spectral_norm(1.0, method="power_iteration"),
    "groups": optclip.clip_by_group_norm(MEDIAN, optclip.by_path(lambda path: path)),
}


@pytest.mark.parametrize("name", LEAF)
def test_carry_over_kept_leaf_continues_beside_new_one(name):
    """The leaf "b" is dropped and "c" is added, which changes positions and digests."""
    tx, rng = LEAF[name], np.random.default_rng(0)
    tree = {k: np.float32(rng.normal(size=SHAPES[k])) for k in "abc"}
    old, new = ({k: tree[k] for k in names} for names in ("ab", "ac"))
    state = after(tx, old)
    starts = (carry(tx, old, state, tx, new), new), (state, old), (tx.init(new), new)
    moved, unbroken, fresh = (compiled(tx)(scaled(x, 2.0), s, x)[0] for s, x in starts)
    np.testing.assert_array_equal(moved["a"], unbroken["a"])
    assert np.any(moved["a"] != fresh["a"])
    if name != "ema":  # Its warm-up couples leaves, and is over when leaves change.
        np.testing.assert_array_equal(moved["c"], fresh["c"])


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_carry_over_history_keeps_newest_rows_by_column(steps):
    tx, other = (optclip.with_history(CLIP, n) for n in (5, steps))
    ac, state = ones("ac"), after(tx, AB, 7)
    moved = carry(tx, AB, state, other, ac)
    before, rows = optclip.history(state), optclip.history(moved)
    for key in ("step", "loss", "clip/norm/a"):
        np.testing.assert_array_equal(rows[key][-5:], before[key][-len(rows[key]) :])
    assert not np.any(rows["clip/norm/c"])
    rows = optclip.history(after(other, ac, 2, state=moved))
    assert rows["step"].tolist()[-2:] == [7, 8]
    assert np.all(rows["clip/norm/c"][-2:] > 0)
    helpers.assert_identical(carry(tx, AB, tx.init(AB), other, AB), other.init(AB))


STATE = clip().init(AB)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (optax.EmptyState(), "structure .*: it lacks"),
        ((STATE, np.ones(1)), r"structure .*: it has the unknown \[1\]"),
        ([STATE], "structure .*: a list instead of a tuple"),
        (jax.tree.map(lambda x: np.stack([x, x]), (STATE,)), r"clip_step .*, got \(2,"),
    ],
)
def test_carry_over_rejects_state_of_another_optimizer(state, words):
    tx = optax.chain(clip())
    with pytest.raises(ValueError, match=words):
        optclip.carry_over(tx, AB, state, tx, AB)
