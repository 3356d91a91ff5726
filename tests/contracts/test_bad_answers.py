"""Invalid results of user-defined rules, responses and scopes; mismatched states."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional, norms, thresholds
from tests.support.helpers import quick_jit

T, V = TypeError, ValueError
TREE = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
LABELS = {"a": "x", "b": "y"}
WHOLE = optclip.clip_by_global_norm


@dataclasses.dataclass(frozen=True)
class Rule:
    """Return the fields, as a rule."""

    answer: Any
    memory: Any = ()

    def init(self, norm):
        return self.memory

    def update(self, seen, memory):
        return self.answer


@dataclasses.dataclass(frozen=True)
class Response:
    """Return the field, as a response."""

    answer: Any

    def coefficient(self, norm, threshold):
        return self.answer

    def element(self, x, lower, upper):
        return self.answer


@dataclasses.dataclass(frozen=True)
class Scope(optclip.scopes.Scope):
    """Return the fields, as a scope."""

    blocks_of: Any
    spreads: Any

    def blocks(self, tree):
        return self.blocks_of

    def spread(self, values, tree):
        return self.spreads


class Failing(Rule):
    """Raise in `update`, as a user's rule."""

    def update(self, seen, memory):
        raise ValueError("raised by the user")


class Concrete(Failing):
    """Require concrete norms in `init`, so that it cannot be traced."""

    def init(self, norm):
        return np.asarray(norm)


def scaled(answer):
    return optclip.clip_by_rms({"a": 1.0, "b": answer})


def once(tx, tree=TREE):
    return tx.update(tree, tx.init(tree))


BLOCK = norms.Block([jnp.ones(2)])
GROUPED = r"max_norm` must be a prefix.*Missing: 'y'.* Unexpected: 'z'.*Pass"
ONLY_X = {"x": 1.0, "z": None}
OF_GRADIENTS = thresholds.of_gradients(thresholds.moment())
OF_OWN = lambda rule: optclip.clip_after(  # noqa: E731
    optax.identity(), optclip.clip_by_global_norm(thresholds.of_gradients(rule))
)
NO_LABEL = optclip.clip_by_group_norm(1.0, optclip.by_path(lambda path: None))
# A transformation, the error of its first step, and its text.
ANSWERS = [
    (WHOLE(lambda step: "x"), T, r"max_norm`: the .*must be a real number.*'x'"),
    (WHOLE(Rule(("x", ()))), T, r"max_norm`: the .*must be a real number.*'x'"),
    (WHOLE(lambda step: True), T, r"max_norm`: the .*must be a real number.*True"),
    (WHOLE(Rule((None, ()))), T, r"max_norm`: the .*must be a real number.*None"),
    (WHOLE(lambda step: thresholds.ema()), T, "max_norm`: .*a real.*the rule itself"),
    (WHOLE(lambda step: np.ones(3)), V, r"max_norm` of shape \(3,\).*shape \(\).*Pass"),
    (WHOLE(Rule((np.ones(3), ()))), V, r"max_norm` of shape \(3,\).*shape \(\).*Pass"),
    (WHOLE(lambda step: {"z": 1.0}), V, "must be a prefix.*Unexpected: 'z'.*pass"),
    (WHOLE(Rule(([], ()))), V, "max_norm` must be a prefix.*pass"),
    (WHOLE(Failing(())), V, "^raised by the user"),
    (OF_OWN(Rule(1.0)), T, "threshold`: .*a tuple of two.*got 1"),
    (scaled(Rule(None)), T, r"`max_rms`: .*update.seen, memory. .*a tuple of two"),
    (scaled(Rule(1.0)), T, r"`max_rms`: .*a tuple of two.*got 1\.0"),
    (scaled(Rule((1.0, (), ()))), T, "`max_rms`: .*a tuple of two"),
    (scaled(Rule((1.0, ()), "x")), T, r"init\(norm\).*pytree of arrays, got 'x'"),
    (scaled(Rule((1.0, None), 0.0)), V, "`max_rms`: .*must return a memory.*got"),
    (scaled(Rule((1.0, np.ones(3)), 0.0)), V, r"structure.*its argument.*got .*\(3,\)"),
    (WHOLE(1.0, response=lambda n, c: "x"), T, "of `response` must be a real"),
    (WHOLE(1.0, response=Response(1j)), T, "of `response` must be a real.*got 1j"),
    (WHOLE(1.0, response=Response(np.ones(3))), V, r"the shape.*Its shape is \(3,\)"),
    (optclip.clip_by_value(1.0, response=Response("x")), T, "of `response` must.*'x'"),
    (optclip.clip_by_value(1.0, response=Response(np.ones(3))), V, "Its shape is"),
    (optclip.clip_by(1.0, over=Scope([3], TREE)), T, r"result of blocks.tree. .*got 3"),
    (optclip.clip_by(1.0, over=Scope(BLOCK, {"a": 0})), V, "return a tree like.*got"),
    (optclip.clip_by(1.0, over=Scope(BLOCK, LABELS)), V, "over=.*a tree like.*'x'"),
    (optclip.clip_by_group_norm(ONLY_X, LABELS), V, GROUPED),
    (optclip.clip_by_value(jnp.ones(3)), V, r"`limit` of shape \(3,\).*Pass"),
    (optclip.clip_by_norm(thresholds.relative_to_params(0.1)), V, "`params` must be"),
    (optclip.recipes.clippy(0.5, 0.1), V, "`params` must be the parameters"),
    (
        optclip.clip_by_value(OF_GRADIENTS),
        V,
        "`gradients` must be .*Wrap.*optclip.clip_after",
    ),
    # A function without `return` labels no leaf.
    (NO_LABEL, V, "labels no leaf.*Return a label"),
    (WHOLE(Rule((1.0, 0.5), jnp.int32(0))), V, "must be floats, got int32"),
    (
        WHOLE(Rule((1.0, jnp.float32(0.5)), jnp.int32(0))),
        V,
        "must be floats, got int32",
    ),
]


@pytest.mark.parametrize(("tx", "error", "words"), ANSWERS)
def test_answer_of_user_wrong_is_named(tx, error, words, run):
    with pytest.raises(error, match=f"(?s){words}") as caught:
        run(lambda: once(tx))()
    assert type(caught.value) is error


OF_PARAMS = thresholds.relative_to_params(0.1)
ONLY_A = {"a": True, "b": False}
BY_NAME = optclip.by_path(lambda path: path[:1])
LACKS = "`params` must be a tree with the leaf '{}', which the updates have, got"
HAS_MORE = "`params` must be a tree .* which lack the leaf 'c', got .*None there"


@pytest.mark.parametrize(
    ("tx", "params", "words"),
    [
        # The tree of a Flax module, with its statistics.
        (optclip.recipes.agc(), {"params": TREE, "c": {}}, LACKS.format("a")),
        (WHOLE(OF_PARAMS), {"params": TREE, "c": {}}, LACKS.format("a")),
        (WHOLE(OF_PARAMS), {"a": TREE["a"], "b": None}, LACKS.format("b")),
        (optclip.clip_by_group_norm(OF_PARAMS, LABELS), {}, LACKS.format("a")),
        (WHOLE(OF_PARAMS, mask=ONLY_A), {"a": TREE["a"]}, LACKS.format("b")),
        (WHOLE(OF_PARAMS, mask=ONLY_A), [TREE["a"]], LACKS.format("a")),
        (optclip.clip_by_norm(OF_PARAMS), TREE | {"c": TREE["b"]}, HAS_MORE),
        (WHOLE(OF_PARAMS), TREE | {"c": TREE["b"]}, HAS_MORE),
        (WHOLE(OF_PARAMS, mask=ONLY_A), TREE | {"c": TREE["b"]}, HAS_MORE),
        (
            optclip.clip_by_group_norm(OF_PARAMS, BY_NAME),
            TREE | {"c": TREE["b"]},
            HAS_MORE,
        ),
    ],
)
def test_params_of_another_structure_are_named(tx, params, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        tx.update(TREE, tx.init(TREE), params)


@pytest.mark.parametrize("measured", ["params", "gradients"])
def test_tree_of_lower_rank_raises_the_error_of_its_axis(measured):
    updates, lower = {"w": jnp.ones((2, 3))}, {"w": jnp.ones(3)}
    of_gradients = thresholds.of_gradients(thresholds.ema())
    rule, passed = (
        (OF_PARAMS, {"params": lower})
        if measured == "params"
        else (of_gradients, {"params": updates, "gradients": lower})
    )
    tx = optclip.clip_by(rule, over=optclip.axes(1))
    with pytest.raises(ValueError, match="`axis` must name axes that each leaf has"):
        tx.update(updates, tx.init(updates), **passed)


def test_params_of_one_array_and_of_tree_are_told_apart():
    tx = WHOLE(OF_PARAMS)
    with pytest.raises(ValueError, match="`params` must be one array, as the updates"):
        tx.update(TREE["a"], tx.init(TREE["a"]), TREE)


@pytest.mark.parametrize("missing", [None, optax.MaskedNode()], ids=["none", "masked"])
def test_params_may_have_leaves_without_updates(missing):
    updates = {"a": TREE["a"], "b": missing}
    for tx in (optclip.clip_by_norm(OF_PARAMS), optclip.recipes.agc()):
        clipped, _ = quick_jit(tx.update)(updates, tx.init(updates), TREE)
        assert np.all(np.abs(clipped["a"]) < np.abs(TREE["a"]))
    # Not clipped, so its parameter is not needed.
    tx = WHOLE(OF_PARAMS, mask=optclip.by_path(lambda path: path == "a"))
    clipped, _ = quick_jit(tx.update)(TREE, tx.init(TREE), {"a": TREE["a"]})
    np.testing.assert_array_equal(clipped["b"], TREE["b"])


def test_prefix_error_lists_first_five_leaves():
    with pytest.raises(V, match=r"Missing: 'l0', 'l1', 'l2', 'l3', 'l4', \.\.\."):
        functional.clip_by_norm({f"l{i}": jnp.ones(1) for i in range(9)}, {})


def test_update_tree_unlike_init_raises():
    tx = optclip.clip_by_norm(1.0, record="leaves")
    state = tx.init(TREE)
    with pytest.raises(V, match="same over= and record=.*unknown .*'b'.*carry_over"):
        tx.update({"a": TREE["a"]}, state)


LEAF, QUANTILE = optclip.clip_by_norm(1.0), optclip.clip_by_norm(thresholds.quantile())
FOREIGN = "must find its own memory in the state, .*got"
FIXED, OF_LEAVES = WHOLE(2.0), WHOLE(2.0, record="leaves")
OTHER_RECORD = "`state` must have been made with the same over= and record=.*Pass"
EMA, BY_LOSS = thresholds.ema(), optclip.skip(FIXED, max_loss=thresholds.quantile(0.5))
ADAM = optax.scale_by_adam()
CHAIN = optax.chain(ADAM, optax.scale(-0.1))
BEFORE, BEFORE_CHAIN = (optclip.clip_before(inner, FIXED) for inner in (ADAM, CHAIN))
PAIR = "the tuple that clip_before's init.*"


@pytest.mark.parametrize(
    ("tx", "state", "error", "words"),
    [
        (LEAF, (), T, r"the ClipState.*tuple.*is tx\.update\(updates, s.*record=False"),
        (
            LEAF,
            optclip.clip_by_norm(1.0, record=False),
            V,
            "ClipState.*got Empty.*record=False, which accepts.*optclip.carry_over",
        ),
        (LEAF, optclip.clip_by_norm(1.0, name="z"), V, "'clip'.*got .'z'.*Pass"),
        (LEAF, optclip.clip_by_norm(1.0, record="leaves"), V, OTHER_RECORD),
        (
            LEAF,
            optclip.clip_by_norm(lambda step: 1.0, record=False),
            V,
            r"got \[\]; record=False",
        ),
        # The state of another norm.
        *(
            (tx, other, V, "from the norms 'Norm .*, got 'Norm .*carry_over")
            for tx, other in (
                (QUANTILE, optclip.clip_by_rms(thresholds.quantile())),
                (QUANTILE, optclip.clip_by_norm(thresholds.quantile(), ord=np.inf)),
                *(
                    tuple(
                        optclip.skip(
                            optax.identity(), max_norm=EMA, norm=norm, over="leaf"
                        )
                        for norm in norms
                    )
                    for norms in (("l2", "rms"), ("average", "rms"))
                ),
            )
        ),
        (LEAF, optclip.clip_by_value(lower=0.0), V, "rule memories: 2.*Pass"),
        (LEAF, optclip.clip_by_group_norm(1.0, LABELS), V, OTHER_RECORD),
        (QUANTILE, LEAF, V, "from the norms 'Norm 2 .*got 'a fixed threshold'.*Pass"),
        (
            QUANTILE,
            optclip.clip_by_norm(thresholds.zscore()),
            V,
            f"{FOREIGN} .*of shapes.*Pass",
        ),
        (
            WHOLE(thresholds.scaled(thresholds.quantile(0.5, 4), 9.0)),
            WHOLE(thresholds.scaled(thresholds.quantile(0.5, 5), 9.0)),
            V,
            f"^`threshold`: the rule Quantile.* {FOREIGN}",
        ),
        (OF_LEAVES, FIXED, V, OTHER_RECORD),
        (FIXED, OF_LEAVES, V, OTHER_RECORD),
        (
            optclip.clip_by_norm({"a": EMA, "b": EMA}),
            optclip.clip_by_norm(EMA),
            V,
            "a memory for each of the 2 rules",
        ),
        *(
            (
                WHOLE(make(window=8)),
                WHOLE(make(window=4)),
                V,
                "window=8.*`window` must be 4, .*got 8",
            )
            for make in (thresholds.quantile, thresholds.mean_plus_std)
        ),
        # A wrapper with the state of its inner transformation.
        *(
            (tx, FIXED, T, f"`state` must be the {name} of .*got Clip.*Pass")
            for tx, name in (
                (optclip.recipes.uclip(FIXED), "ErrorFeedbackState"),
                (optclip.with_periodic_reset(FIXED), "PeriodicResetState"),
                (optclip.skip(FIXED), "SkipState"),
                (optclip.clip_after(FIXED, FIXED), "ClipAfterState"),
                (optclip.constrain(FIXED, FIXED), "ConstrainState"),
            )
        ),
        (BY_LOSS, optclip.skip(FIXED), V, "state` must be .* skip with max_loss, got"),
        (
            optclip.skip(FIXED),
            BY_LOSS,
            V,
            "state` must be .* skip without max_loss, got",
        ),
        (
            BEFORE,
            ADAM,
            T,
            PAIR + r"got ScaleByAdamState\.",
        ),
        (
            BEFORE_CHAIN,
            CHAIN,
            T,
            PAIR + r"got \(ScaleByAdamState, EmptyState\)\.",
        ),
        (
            BEFORE,
            optax.chain(FIXED, ADAM),
            T,
            PAIR + r"got \(Clip.* pass \(state\[1\], state\[0\]",
        ),
        (
            BEFORE_CHAIN,
            optax.chain(FIXED, CHAIN),
            T,
            PAIR + r" pass \(\*state\[1\], state\[0\]\) for a",
        ),
    ],
)
def test_update_state_of_something_else_raises(tx, state, error, words):
    state = state and state.init(TREE)
    with pytest.raises(error, match=f"(?s){words}"):
        tx.update(TREE, state)


@pytest.mark.parametrize(
    ("factory", "arguments", "words"),
    [
        (optclip.clip_by_norm, {"mask": jnp.array(True)}, "static_args=.'mask'"),
        (WHOLE, {"response": 3.0}, "static_args=.'response'"),
        (optclip.clip_by_group_norm, {"groups": 3.0}, "static_args=.'groups'"),
        (optclip.clip_by_norm, {"axis": 0}, "static_args=.'axis'"),
        (optclip.clip_by_norm, {"ord": 1.0}, "static_args=.'ord'"),
        (
            optclip.clip_by_norm,
            {"mask": optclip.by_path(lambda path: path != "b")},
            "result of by_path.*single number.*static_args",
        ),
    ],
)
def test_inject_hyperparams_structural_argument_must_be_static(
    factory, arguments, words
):
    tx = optax.inject_hyperparams(factory)(max_norm=1.0, **arguments)
    with pytest.raises(T, match=f"(?s){words}"):
        once(tx)


def test_rule_with_init_of_concrete_norms_raises_its_own_error():
    with pytest.raises(ValueError, match="^raised by the user"):
        once(WHOLE(Concrete(())))
