"""The cases of PyTorch's `test_nn.py` for clipping, run on both."""

import jax
import numpy as np
import pytest

import optclip

from .libraries import load
from .ours import function, values

torch = load("torch")

ORDERS = [0.5, 1.5, 2.0, 4.0, np.inf]


def layer(weight, bias):
    """A linear layer with these gradients, and they in NumPy."""
    module = torch.nn.Linear(10, 10)
    module.weight.grad = weight.clone()
    module.bias.grad = bias.clone()
    return list(module.parameters()), [weight.numpy(), bias.numpy()]


def in_numpy(params):
    return [p.grad.numpy() for p in params]


def as_arrays(leaves):
    return [np.asarray(x) for x in leaves]


def norm_of(leaves, ord):
    """By the definition that the suite has."""
    if ord == np.inf:
        return max(np.abs(x).max() for x in leaves)
    return sum((np.abs(x) ** ord).sum() for x in leaves) ** (1 / ord)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("ord", ORDERS)
def test_clip_grad_norm(ord, foreach):
    """Down to the norm, everything by one factor."""
    params, before = layer(torch.arange(1.0, 101).view(10, 10), torch.ones(10) / 1000)
    norm = norm_of(before, ord)
    theirs_norm = torch.nn.utils.clip_grad_norm_(
        params, 2, norm_type=ord, foreach=foreach
    )
    clip = function("clip_by_global_norm", ord=ord, eps=1e-6)
    mine, mine_norm = clip(before, 2.0)
    results = [(theirs_norm, in_numpy(params)), (mine_norm, as_arrays(mine))]
    for returned, after in results:
        np.testing.assert_allclose(float(returned), norm, rtol=2e-6)
        np.testing.assert_allclose(norm_of(after, ord), 2.0, rtol=2e-6)
        scale = np.concatenate(
            [(a / b).ravel() for a, b in zip(after, before, strict=True)]
        )
        assert scale.std() < 1e-6 * scale.mean()
    np.testing.assert_allclose(mine[0], results[0][1][0], rtol=1e-6)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("ord", ORDERS)
def test_small_gradients_are_not_clipped(ord, foreach):
    """The factor is exactly 1."""
    params, before = layer(
        torch.rand(10, 10, generator=torch.manual_seed(0)) / 10000, torch.ones(10) / 500
    )
    torch.nn.utils.clip_grad_norm_(params, 2, norm_type=ord, foreach=foreach)
    clip = function("clip_by_global_norm", ord=ord, eps=1e-6)
    mine, norm = clip(before, 2.0)
    assert float(norm) <= 2.0
    for after in (in_numpy(params), mine):
        for a, b in zip(after, before, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grads_with_norm(foreach):
    """The norm first, then the clip by it; the same as both at once."""
    params, before = layer(torch.arange(1.0, 101).view(10, 10), torch.ones(10) / 1000)
    norm = torch.nn.utils.get_total_norm([p.grad for p in params], foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(params, 2, norm, foreach=foreach)
    clip = function("clip_by_global_norm", eps=1e-6)
    mine, returned = clip(before, 2.0, use_norm=float(norm))
    assert float(returned) == float(norm)
    for a, b, c in zip(mine, in_numpy(params), clip(before, 2.0)[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-7)
        np.testing.assert_allclose(a, c, rtol=3e-7)


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_value(foreach):
    """At 2.5, a None gradient among them, and a single one outside any list."""
    weight, ones = torch.arange(-50.0, 50).view(10, 10) / 5, torch.ones(10) * 2
    for first, second in ((weight, None), (None, ones), (weight, ones)):
        params = list(torch.nn.Linear(10, 10).parameters())
        for param, grad in zip(params, (first, second), strict=True):
            param.grad = None if grad is None else grad.clone()
        torch.nn.utils.clip_grad_value_(params, 2.5, foreach=foreach)
        tree = [None if g is None else g.numpy() for g in (first, second)]
        for mine in values()(tree, -2.5, 2.5):
            for found, param in zip(mine, params, strict=True):
                if found is None:
                    assert param.grad is None
                    continue
                assert np.abs(found).max() <= 2.5
                np.testing.assert_array_equal(found, param.grad.numpy())
    torch.nn.utils.clip_grad_value_(params[0], 1.0, foreach=foreach)
    mine = optclip.functional.clip_by_value(weight.numpy(), lower=-1.0, upper=1.0)
    np.testing.assert_array_equal(mine, params[0].grad.numpy())


def test_error_if_nonfinite():
    """`nonfinite="raise"` under checkify is `error_if_nonfinite=True`."""
    from jax.experimental import checkify

    bad = np.array([1.0, np.inf], np.float32)
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor(bad)
    with pytest.raises(RuntimeError, match="is non-finite"):
        torch.nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)

    def clip(grads):
        return optclip.functional.clip_by_global_norm(grads, 1.0, nonfinite="raise")

    error, _ = jax.jit(checkify.checkify(clip))({"w": bad})
    with pytest.raises(checkify.JaxRuntimeError, match="non-finite update"):
        error.throw()
