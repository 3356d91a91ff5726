"""What only shows at `init` and `update`: wrong answers of a user's rules, responses,
schedules and scopes, trees and states that do not match; and trees without leaves.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from optclip import thresholds
from tests.support import helpers

TREE = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
LABELS = {"a": "x", "b": "y"}


@dataclasses.dataclass(frozen=True)
class Answering:
    """A rule that returns what it was made with."""

    answer: Any
    memory: Any = ()

    def init(self, norm):
        return self.memory

    def update(self, seen, memory):
        return self.answer


@dataclasses.dataclass(frozen=True)
class Arranging(optclip.scopes.Scope):
    """A scope that returns what it was made with."""

    arranged: Any
    spreads: Any

    def blocks(self, tree):
        return self.arranged

    def spread(self, values, tree):
        return self.spreads


def once(tx, tree=TREE):
    return tx.update(tree, tx.init(tree))


def compiled_once(tx, tree):
    return helpers.quick_jit(lambda tree: once(tx, tree))(tree)


def refused(run, error, words, function):
    """The error is of just that type, whether the call is compiled or not."""
    with pytest.raises(error, match=f"(?s){words}") as caught:
        run(function)()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ("x", TypeError, r"max_norm`: the .*must be a real number.*'x' \(str\)"),
        (None, TypeError, r"max_norm`: the .*must be a real number.*None \(NoneType\)"),
        (True, TypeError, r"max_norm`: the .*must be a real number.*True \(bool\)"),
        (1j, TypeError, r"max_norm`: the .*must be a real number.*1j \(complex\)"),
        (np.ones(3), ValueError, r"max_norm` of shape \(3,\).*shape \(\).*Give"),
        (
            {"z": 1.0},
            ValueError,
            "max_norm` must be a prefix of the structure.*unknown 'z'.*[Gg]ive",
        ),
        ([], ValueError, "max_norm` must be a prefix.*[Gg]ive"),
        (thresholds.constant(1.0), TypeError, "max_norm`: the .*must be a real number"),
    ],
    ids=["str", "none", "bool", "complex", "vector", "dict", "empty", "rule"],
)
def test_a_threshold_that_is_none(answer, error, words, run):
    """By a schedule and by a rule alike."""
    for threshold in (lambda step: answer, Answering((answer, ()))):
        tx = optclip.clip_by_global_norm(threshold)
        refused(run, error, words, lambda tx=tx: once(tx))


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (Answering(None), TypeError, "update.seen, memory. .*a tuple of two.*got None"),
        (Answering(1.0), TypeError, r"a tuple of two.*got 1\.0"),
        (Answering((1.0, (), ())), TypeError, "a tuple of two"),
        (
            Answering((1.0, ()), "x"),
            TypeError,
            r"init\(norm\).*pytree of arrays, got 'x\'",
        ),
        (Answering((1.0, None), 0.0), ValueError, "must return a memory of.*got"),
        (
            Answering((1.0, np.ones(3)), 0.0),
            ValueError,
            r"memory of.*it is given.*got .*\(3,\)",
        ),
    ],
)
def test_a_rule_that_answers_nonsense(rule, error, words, run):
    tx = optclip.clip_by_rms({"a": 1.0, "b": rule})
    refused(run, error, f"`max_rms`: .*{words}", lambda: once(tx))


@pytest.mark.parametrize("rule", [thresholds.ema(), thresholds.quantile(0.5, 4)])
def test_a_memory_of_another_tree(rule, run):
    """Without a record there is nothing else in the state to tell it by."""
    tx = optclip.clip_by_norm(rule, record=False)
    state = tx.init({"a": jnp.ones(2)})
    words = "the memory in the state must .*'b'.*got .*'a'.*Give the state that init"
    refused(run, ValueError, words, lambda: tx.update({"b": jnp.ones(2)}, state))


def test_a_rule_that_fails_by_itself(run):
    class Failing:
        def init(self, norm):
            return jnp.zeros(())

        def update(self, seen, memory):
            raise ValueError("of its own")

    class Particular(Failing):
        def init(self, norm):
            return np.zeros(int(norm))

    tx = optclip.clip_by_global_norm(Failing())
    refused(run, ValueError, "^of its own", lambda: once(tx))
    other = optclip.clip_by_global_norm(Particular())
    state = other.init(TREE)
    refused(run, ValueError, "^of its own", lambda: other.update(TREE, state))


def test_a_number_is_a_memory():
    tx = optclip.clip_by_global_norm(Answering((1.0, 2), 0.0))
    _, state = compiled_once(tx, TREE)
    assert state.clip_memory[0][0] == 2.0


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ("x", TypeError, r"`response` returns must be a real number.*got 'x' \(str\)"),
        (None, TypeError, "`response` returns must be a real number.*got None"),
        (1j, TypeError, "`response` returns must be a real number.*got 1j"),
        (
            np.ones(3),
            ValueError,
            r"`response` returns .*broadcasts to the shape.*Its shape is \(3,\)",
        ),
    ],
    ids=["str", "none", "complex", "vector"],
)
def test_a_response_that_answers_nonsense(answer, error, words, run):
    class Own:
        def coefficient(self, norm, threshold):
            return answer

    class OfElements(Own):
        def element(self, x, lower, upper):
            return answer

    for response in (lambda norm, threshold: answer, Own()):
        tx = optclip.clip_by_global_norm(1.0, response=response)
        refused(run, error, words, lambda tx=tx: once(tx))
    tx = optclip.clip_by_value(1.0, response=OfElements())
    words = words.replace(r"\(\) it", r"\(\d,\) it")
    refused(run, error, words, lambda: once(tx))


@pytest.mark.parametrize(
    ("scope", "error", "words"),
    [
        (
            Arranging([3], TREE),
            TypeError,
            "blocks.tree. returns must be .*norms.Block, got 3",
        ),
        (
            Arranging(optclip.norms.Block([jnp.ones(2)]), {"a": 0}),
            ValueError,
            "spread.values, tree. must return a tree like.*got the structure",
        ),
        (
            Arranging(optclip.norms.Block([jnp.ones(2)]), {"a": "x", "b": 0}),
            ValueError,
            "spread.values, tree. must return a tree like.*'x'",
        ),
    ],
)
def test_a_scope_that_answers_nonsense(scope, error, words, run):
    tx = optclip.clip_by(1.0, over=scope)
    refused(run, error, f"over=.*{words}", lambda: once(tx))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"x": 1.0}, "It lacks 'y'"),
        ({"x": 1.0, "y": 1.0, "z": 1.0}, "It has the unknown 'z'"),
        ({"x": 1.0, "z": None}, "It lacks 'y'.* It has the unknown 'z'"),
    ],
)
def test_group_thresholds_name_just_the_labels(limits, words, run):
    words = f"max_norm` must be a prefix of the structure.*{words}.*Give"
    tx = optclip.clip_by_group_norm(limits, LABELS)
    refused(run, ValueError, words, lambda: once(tx))
    clip = lambda: F.clip_by_group_norm(TREE, limits, LABELS)  # noqa: E731
    refused(run, ValueError, words, clip)


def test_long_lists_are_cut_short():
    with pytest.raises(ValueError, match=r"lacks 'l0', 'l1', 'l2', 'l3', 'l4', \.\.\."):
        F.clip_by_norm({f"l{i}": jnp.ones(1) for i in range(9)}, {})


def test_a_limit_of_the_wrong_shape_has_its_name(run):
    tx = optclip.clip_by_value(jnp.ones(3))
    refused(run, ValueError, r"`limit` of shape \(3,\).*Give", lambda: once(tx))


def test_updates_of_another_kind_than_init_saw(run):
    string = {"a": {"b": "x"}}
    tx = optclip.clip_by_norm(1.0, record="leaves")
    refused(
        run,
        TypeError,
        "'a/b' must be an array.*str.*Remove it",
        lambda: tx.init(string),
    )
    state = tx.init(TREE)
    update = lambda: tx.update(string, state)  # noqa: E731
    refused(run, TypeError, "'a/b' must be an array.*str.*Remove it", update)
    update = lambda: tx.update({"a": TREE["a"]}, state)  # noqa: E731
    refused(run, ValueError, "updates must have norms of.*Give init and update", update)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ((), TypeError, "`state` must be a ClipState.*tuple.*Give the state that init"),
        (
            None,
            TypeError,
            "`state` must be a ClipState.*NoneType.*Give the state that init",
        ),
        (
            optax.EmptyState(),
            TypeError,
            "`state` must be a ClipState.*EmptyState.*Give the state",
        ),
        (optclip.clip_by_norm(1.0, name="z").init(TREE), ValueError, "for .'z'.*Give"),
        (
            optclip.clip_by_norm(lambda step: 1.0, record=False).init(TREE),
            ValueError,
            "another",
        ),
        (optclip.clip_by_value(lower=0.0).init(TREE), ValueError, "2 thresholds.*Give"),
    ],
)
def test_a_state_of_something_else(state, error, words, run):
    tx = optclip.clip_by_norm(1.0)
    refused(run, error, words, lambda: tx.update(TREE, state))


RULES = {
    "number": 1.0,
    "quantile": thresholds.quantile(0.5, 4),
    "zscore": thresholds.zscore(),
    "ema": thresholds.ema(),
    "mean_over_rms": thresholds.mean_over_rms(),
    "second_moment": thresholds.second_moment(),
}
SCOPES = {
    "tree": "tree",
    "leaf": "leaf",
    "axes": optclip.axes(0),
    "groups": optclip.groups({"a": "x", "b": "y"}),
    "element": "element",
}


@pytest.mark.covering(rule=list(RULES), over=list(SCOPES))
def test_a_state_of_another_clip_is_taken_or_refused_with_advice(rule, over):
    tree = {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 2))}
    tx = optclip.clip_by(RULES[rule], over=SCOPES[over])
    others = [(name, over) for name in RULES] + [(rule, name) for name in SCOPES]
    answered = 0
    for other, scope in others:
        made = optclip.clip_by(RULES[other], over=SCOPES[scope])
        state = jax.eval_shape(made.init, tree)
        try:
            _, after = jax.eval_shape(tx.update, tree, state, tree)
        except ValueError as error:
            answered += "Give" in str(error)
        else:
            answered += 1
            assert jax.tree.structure(after) == jax.tree.structure(state)
    assert answered == len(others)


@pytest.mark.parametrize("tree", [{}, (), [], None, {"a": None}, {"a": {}}])
def test_empty_trees_are_no_error(tree, run):
    some = [
        optclip.clip_by_value(1.0),
        optclip.clip_by_norm(1.0),
        optclip.clip_by_norm(1.0, axis=0, record="leaves"),
        optclip.clip_by_group_norm(1.0, optclip.by_path(lambda path: "x")),
        optclip.clip_by_global_norm(1.0, clip_mask=lambda tree: tree),
    ]
    for tx in some:
        found, state = run(lambda tx=tx: once(tx, tree))()
        helpers.assert_identical(found, tree)
        assert all(v == 0 for k, v in optclip.metrics(state).items() if "norm" in k)
    assert run(lambda: F.global_norm(tree))() == 0


def test_leaves_of_one_path_do_not_hide_each_other():
    tree = {"a/b": jnp.array([3.0]), "a": {"b": jnp.array([4.0]), "b_2": jnp.ones(1)}}
    _, state = compiled_once(optclip.clip_by_norm(1.0, record="leaves"), tree)
    found = optclip.metrics(state)
    norms = [v for k, v in found.items() if k.startswith("clip/norm/")]
    assert sorted(norms) == [1.0, 3.0, 4.0]
    assert found["clip/norm/a/b"] == 4.0
    assert found["clip/norm/a/b_3"] == 3.0


@pytest.mark.parametrize(
    ("factory", "arguments", "static"),
    [
        (optclip.clip_by_norm, {"max_norm": 1.0, "mask": jnp.array(True)}, "mask"),
        (optclip.clip_by_global_norm, {"max_norm": 1.0, "response": 3.0}, "response"),
        (optclip.clip_by_group_norm, {"max_norm": 1.0, "groups": 3.0}, "groups"),
        (optclip.clip_by_norm, {"max_norm": 1.0, "axis": 0}, "axis"),
        (optclip.clip_by_norm, {"max_norm": 1.0, "ord": 1.0}, "ord"),
    ],
)  # fmt: skip
def test_what_inject_hyperparams_must_have_as_static(factory, arguments, static):
    tx = optax.inject_hyperparams(factory)(**arguments)
    with pytest.raises(TypeError, match=f"(?s){static}.*static_args=.'{static}'"):
        once(tx)


def test_a_mask_by_path_under_inject_hyperparams():
    mask = optclip.by_path(lambda path: path != "b")
    tx = optax.inject_hyperparams(optclip.clip_by_norm)(1.0, mask=mask)
    with pytest.raises(TypeError, match="function by path.*single number.*static_args"):
        once(tx)
