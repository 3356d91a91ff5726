"""Eager calls compile once, whatever numbers they receive.

Of transformations, `test_jax.py` promises it.
"""

import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optclip
from optclip import functional, groups, per_example, responses
from tests.support import helpers

W, X = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}, jnp.ones((4, 2))
LABELS = groups({"a": "x", "b": "y"})


def scanned(w, x):
    def layer(carry, _):
        return jnp.tanh(w["a"] @ carry + w["b"]), None

    return jnp.sum(jax.lax.scan(layer, x, None, length=2)[0])


def clipped(c, **options):
    return per_example.clipped_grad(scanned, c, **options)(W, X)


CALLS = {
    "microbatches": lambda c: clipped(c, microbatch_size=2),
    "groups": lambda c: clipped({"x": c, "y": c}, over=LABELS, microbatch_size=2),
    "ghost": lambda c: clipped(c, method="ghost"),
    "weights": lambda c: per_example.clipped_grad(
        scanned, 0.5, microbatch_size=2, max_weight=c
    )(W, X, weights=jnp.full(4, c + 1), thresholds=jnp.full(4, c)),
    "norms": lambda c: per_example.norms(scanned, microbatch_size=2)(W, X),
    "eps": lambda c: functional.clip_by_norm(W, 1.0, eps=c),
    "band": lambda c: functional.clip_by(
        W, 1.0, over="leaf", response=responses.detached(responses.band(c))
    ),
    "cotangent": lambda c: jax.grad(
        lambda w: 3 * jnp.sum(optclip.clip_cotangent(w, c)["a"])
    )(W),
    "smooth": lambda c: functional.clip_by(W, 1.0, response=responses.Smooth(c)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_second_eager_call_compiles_nothing(call):
    call(0.5)
    with helpers.compilations() as compilations:
        second = call(0.25)
    assert not compilations
    expected = helpers.quick_jit(call)(jnp.float32(0.25))
    helpers.assert_close(second, expected)


def sums_of(loss, *args, w=1.0):
    f = per_example.clipped_grad(loss, jnp.inf, microbatch_size=2)
    return f(jnp.float32(w), X[:, 0], *args)[0]


def test_eager_loss_reads_values_of_now():
    factor = 1.0

    def loss(w, x):
        return w * x * factor

    found = [sums_of(loss)]
    factor = 3.0
    assert [*found, sums_of(loss)] == [4.0, 12.0]
    # A plain number in place of an array, of the same value.
    branches = lambda w, x, flag: w * x * (2.0 if flag is True else 1.0)  # noqa: E731
    assert [sums_of(branches, flag) for flag in (True, 1)] == [8.0, 4.0]


def test_eager_loss_may_read_value_of_argument():
    def loss(w, x, flag):
        return w * x * (2.0 if float(flag) > 0 else 1.0)

    assert [sums_of(loss, jnp.float32(flag)) for flag in (1, -1)] == [8.0, 4.0]


def test_program_of_loss_is_freed_with_it():
    large = np.ones(4, np.float32)

    def make():
        captured = large.copy()

        def loss(w, x):
            return jnp.sum(w * x * captured)

        sums_of(loss)
        return weakref.ref(loss), weakref.ref(captured)

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_programs_end_before_interpreter():
    """Removing a program later would need modules that Python has cleared."""
    code = """
import jax.numpy as jnp, optclip
def loss(w, x):
    return w["a"] * x
over, w, x = optclip.groups({"a": "x"}), {"a": jnp.ones(())}, jnp.ones(2)
optclip.per_example.clipped_grad(loss, 1.0, over=over, microbatch_size=1)(w, x)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Exception" not in done.stderr


def test_few_programs_are_kept(monkeypatch):
    """Losses may refer to themselves, which keeps them from being freed."""
    from optclip._per_example import _eager  # The cache has no public face.

    monkeypatch.setattr(_eager, "_MOST", 1)
    losses = [lambda w, x: w * x, lambda w, x: w * x if True else later]
    assert [sums_of(loss) for loss in losses] == [4.0, 4.0]
    assert [key[0]() for key in _eager._programs] == losses[1:]
    later = None


def test_eager_call_with_array_in_response_is_not_cached():
    clip = per_example.clipped_grad(
        lambda w, x: w * x, 0.5, method="ghost", response=responses.band(jnp.ones(()))
    )
    assert clip(jnp.float32(1.0), X[:, 0])[0] < 4.0
