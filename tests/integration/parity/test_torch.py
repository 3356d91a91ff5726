"""Random cases: `torch.nn.utils` of PyTorch 2.13 and the same clip of ours.

PyTorch divides by the norm plus 1e-6; `eps=1e-6` is that formula.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import optclip

from . import ours
from .cases import BF16, DTYPES, F16, F32, F64, draw, eps, many, norm, wide
from .libraries import load
from .tally import difference

torch = load("torch")

EPS = 1e-6
SHAPES = [(4, 3), (3,), ()]
TREES = [[(7,)], SHAPES]

ORDERS = [
    *((ord, F32) for ord in (0.5, 1.0, 1.5, 2.0, 4.0, np.inf)),
    *((ord, F64) for ord in (1.5, 2.0, 4.0, np.inf)),
    *((ord, dtype) for ord in (0.5, 2.0, np.inf) for dtype in (BF16, F16)),
]

# A norm within a ULP or two for its powers and its root, and three roundings. In
# bfloat16 and float16 PyTorch rounds norm, quotient and product; ours once.
ULPS = {F32: 6, F64: 6, BF16: 4, F16: 4}

# PyTorch's powers of 1.5 are of numbers as they are, up to 1e6: it loses 8 ULP of the
# norm there. Ours are of numbers up to 1: see `test_norms_of_any_order`.
LOST = {1.5: 6}


def named(value):
    return str(value)


def tensor(x):
    """A tensor of an array, bfloat16 by way of float32, which has all its numbers."""
    if x.dtype == BF16:
        return torch.tensor(x.astype(F32)).to(torch.bfloat16)
    return torch.tensor(x)


def with_grads(leaves):
    """Parameters with these gradients; None where there is none."""
    params = []
    for x in leaves:
        param = torch.nn.Parameter(torch.zeros(()) if x is None else tensor(x * 0))
        param.grad = None if x is None else tensor(x)
        params.append(param)
    return params


def grads(params):
    return [p.grad for p in params]


@pytest.mark.parametrize(("ord", "dtype"), ORDERS, ids=named)
def test_clip_grad_norm(tally, ord, dtype):
    """`foreach` True and False in turn; the norm that is returned, and the gradients."""
    found = tally("torch")
    clip = ours.both("clip_by_global_norm", ord=ord, eps=EPS)
    ulps = ULPS[dtype] + LOST.get(ord, 0)
    for case in many(60, dtype, 30_000, TREES if dtype == F32 else [SHAPES]):
        limit = case.threshold(norm(case.leaves, ord) + EPS)
        params = with_grads(case.leaves)
        their_norm = torch.nn.utils.clip_grad_norm_(
            params, limit, norm_type=ord, foreach=bool(case.seed // 2 % 2)
        )
        (plain, our_norm), updates = clip(case.leaves, limit)
        found.close(case, [our_norm], [their_norm], ulps, what="norm")
        for clipped in (plain, updates):
            found.close(case, clipped, grads(params), ulps + case.near)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


@pytest.mark.parametrize("ord", [0.5, 1.0, 1.5, 2.0, 4.0, np.inf])
def test_norms_of_any_order(ord):
    """Where the two are apart, ours is right: 3 ULP from the norm in float64."""
    measure = ours.function("global_norm", ord=ord)
    for case in many(100, F32, 30_000, TREES):
        true = np.float64(norm(case.leaves, ord))
        assert difference(measure(case.leaves), true) <= 3 * eps(F32), str(case)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=named)
def test_clip_grads_with_norm(tally, dtype):
    """A norm in hand, the true one of `get_total_norm` or another."""
    found = tally("torch")
    clip = jax.jit(
        lambda tree, limit, norm: ours.functional.clip_by_global_norm(
            tree, limit, use_norm=norm, eps=EPS
        )
    )
    for case in many(100, dtype, 31_000, TREES):
        params = with_grads(case.leaves)
        in_hand = torch.nn.utils.get_total_norm(grads(params))
        if case.seed % 2:
            in_hand = in_hand * 0.75 + 0.125
        limit = case.threshold(float(in_hand) + EPS)
        torch.nn.utils.clip_grads_with_norm_(params, limit, in_hand)
        clipped, returned = clip(case.leaves, limit, float(in_hand))
        assert float(returned) == float(in_hand)
        found.close(case, clipped, grads(params), ULPS[dtype] + case.near)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_clip_grad_value(tally, dtype):
    """To the bit; a None gradient among them."""
    found = tally("torch")
    for case in many(100, dtype, 32_000):
        limit = case.threshold(max(np.abs(wide(x)).max() for x in case.leaves))
        params = with_grads([*case.leaves, None])
        foreach = bool(case.seed % 2)
        torch.nn.utils.clip_grad_value_(params, limit, foreach=foreach)
        *theirs, none = grads(params)
        for *clipped, kept in ours.values()([*case.leaves, None], -limit, limit):
            assert kept is None is none
            found.same(case, clipped, theirs)
        found.count(case, clipped, case.leaves)
    found.finish(clipped=0.4, untouched=0.3)


def test_leaves_of_several_dtypes(tally):
    """bfloat16 beside float32: one norm, one factor, each in its own precision."""
    found = tally("torch")
    clip = ours.both("clip_by_global_norm", eps=EPS)
    for case in many(100, BF16, 33_000, [[(4, 3)]]):
        leaves = [*case.leaves, draw(case.seed, [(5,)], BF16).leaves[0].astype(F32)]
        limit = case.threshold(norm(leaves) + EPS)
        params = with_grads(leaves)
        torch.nn.utils.clip_grad_norm_(params, limit)
        for clipped in (clip(leaves, limit)[0][0], clip(leaves, limit)[1]):
            found.close(case, clipped, grads(params), ULPS[BF16] + case.near)
            assert [x.dtype for x in clipped] == [BF16, F32]
        found.count(case, clipped, leaves)
    found.finish(clipped=0.4, untouched=0.3)


LR, STEPS = 0.05, 5
SGD, ADAM = torch.optim.SGD, torch.optim.Adam


def by_norm(threshold):
    return optclip.clip_by_global_norm(threshold, eps=EPS)


def decayed():
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR, momentum=0.9))


# name: (PyTorch, its settings, optax).
OPTIMIZERS = {
    "sgd": (SGD, {}, functools.partial(optax.sgd, LR)),
    "momentum": (
        SGD,
        {"momentum": 0.9},
        functools.partial(optax.sgd, LR, momentum=0.9),
    ),
    "nesterov": (
        SGD,
        {"momentum": 0.9, "nesterov": True},
        functools.partial(optax.sgd, LR, momentum=0.9, nesterov=True),
    ),
    "weight_decay": (SGD, {"momentum": 0.9, "weight_decay": 0.1}, decayed),
    # Powers of two: optax's bias correction is in float32, where 1 - 0.999 is inexact.
    "adam": (
        ADAM,
        {"betas": (0.5, 0.75)},
        functools.partial(optax.adam, LR, b1=0.5, b2=0.75),
    ),
}


@pytest.mark.parametrize("which", ["norm", "value"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(tally, name, which):
    """Real training steps: clip, then step; the parameters after each."""
    found = tally("torch")
    make, settings, make_optax = OPTIMIZERS[name]
    utils = torch.nn.utils
    theirs_clip = utils.clip_grad_norm_ if which == "norm" else utils.clip_grad_value_
    parts = ours.step(by_norm if which == "norm" else optclip.clip_by_value, make_optax)
    for seed in range(34_000, 34_030):
        case = draw(seed, SHAPES, F32)
        rng = case.rng
        start = [np.asarray(rng.normal(size=s), F32) for s in SHAPES]
        size = 10 ** rng.uniform(-2, 2)
        steps = [
            [np.asarray(rng.normal(size=s) * size * k, F32) for s in SHAPES]
            for k in 10 ** rng.uniform(-0.5, 0.5, STEPS)
        ]
        limit = float(np.float32(size * 10 ** rng.uniform(-1, 1.5)))
        params = [torch.nn.Parameter(tensor(p)) for p in start]
        optimizer = make(params, lr=LR, **settings)
        travelled = [np.abs(wide(p)) for p in start]
        mine = ours.train(parts, start, steps, limit)
        free = ours.train(parts, start, steps, np.inf)
        for t, step in enumerate(steps):
            before = [wide(p) for p in params]
            for param, g in zip(params, step, strict=True):
                param.grad = tensor(g)
            theirs_clip(params, limit)
            optimizer.step()
            moved = [np.abs(wide(p) - b) for p, b in zip(params, before, strict=True)]
            travelled = [d + m for d, m in zip(travelled, moved, strict=True)]
            found.close(case, mine[t], params, 8, travelled, f"step {t}")
        found.cases += 1
        found.clipped += any(
            np.any(np.abs(wide(a) - wide(b)) > 1000 * eps(F32) * d)
            for a, b, d in zip(mine[-1], free[-1], travelled, strict=True)
        )
    found.finish(clipped=0.4, untouched=0.1)
