"""Every published method against its paper in float64, over 240 nasty steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes
from tests.support import helpers, methods, methods_steps

GROUPS = optclip.by_path(lambda path: path)


def is_sound(tree):
    return methods.sound(*tree.values())


def norm_of(tree):
    return float(np.sqrt(sum(np.sum(x**2) for x in tree.values())))


SPIKES = (30, 150)
SOUND = [tree for tree in methods.GRADIENTS if is_sound(tree)]
PARAMS = {
    "w": np.linspace(-2.0, 3.0, 12).reshape(4, 3),
    "b": np.array([0.0, 1e-4, -5.0]),
}


def as_jax(tree):
    return {key: jnp.asarray(x, jnp.float32) for key, x in tree.items()}


def stacked(trees):
    return {key: np.float32([tree[key] for tree in trees]) for key in trees[0]}


def outputs_of(tx, gradients, params=None):
    """What the transformation makes of each step, as NumPy float64; and its state."""
    params = as_jax(PARAMS if params is None else params)

    @helpers.quick_jit
    def run(rows):
        def step(state, tree):
            out, state = tx.update(tree, state, params)
            return state, out

        return jax.lax.scan(step, tx.init(params), rows)

    state, outs = run(stacked(gradients))
    wide = helpers.as_float64(outs)
    found = [{k: x[i] for k, x in wide.items()} for i in range(len(gradients))]
    return found, state


def assert_follow(
    found, gradients, expected, *, rtol=1e-5, atol=0.0, least=0.1, most=0.9
):
    """As the oracle has it on all finite steps; some steps are clipped, some not.

    To twice what was seen on any CPU, 1e-5 or 2e-5.
    """
    changed = []
    for out, tree, wanted in zip(found, gradients, expected, strict=True):
        if not is_sound(tree):
            continue
        for key in tree:
            scale = np.max(np.abs(wanted[key]), initial=0.0)
            np.testing.assert_allclose(
                out[key], wanted[key], rtol=rtol, atol=atol + rtol * 0.1 * scale
            )
        pairs = ((wanted[key], tree[key]) for key in tree)
        changed.append(any(not np.allclose(a, b, rtol=1e-4) for a, b in pairs))
    assert least <= np.mean(changed) <= most


def by_leaf(oracle, gradients):
    """One oracle a leaf."""
    return by_leaf_of({key: oracle() for key in gradients[0]}, gradients)


def by_leaf_of(oracles, gradients, *trees):
    """The same with oracles made; a step that is bad in one is bad for all."""
    found = []
    for tree in gradients:
        bad = not is_sound(tree)
        given = {k: np.full_like(x, np.nan) if bad else x for k, x in tree.items()}
        more = {k: [other[k] for other in trees] for k in tree}
        found.append({k: oracles[k].step(given[k], *more[k]) for k in tree})
    return found


def scaled_by_norm(oracle, gradients):
    """The same for an oracle of norms, all leaves at once; zeros teach it nothing."""
    found = []
    for tree in gradients:
        norms = np.array([np.sqrt(np.sum(tree[key] ** 2)) for key in sorted(tree)])
        scales = oracle.step(norms if np.all(norms > 0) else np.full(2, np.nan))
        scales = np.where(norms > 0, scales, 1.0)
        pairs = zip(sorted(tree), scales, strict=True)
        found.append({key: tree[key] * scale for key, scale in pairs})
    return found


def test_spam_follows_its_equations():
    tx = recipes.spam(optax.identity(), theta=25.0, b2=0.9, every=50, warmup=0)
    gradients = methods.GRADIENTS
    found, _ = outputs_of(optclip.skip(tx), gradients)
    expected = by_leaf(lambda: methods.Spam(25.0, 0.9, 20, 50), gradients)
    # The authors count the first 19 steps as warm-up, we 20.
    assert all(np.array_equal(expected[19][k], gradients[19][k]) for k in expected[19])
    assert_follow(found, gradients, expected, least=0.05)
    for i in SPIKES:
        assert np.max(np.abs(found[i]["w"])) < 0.1 * np.max(np.abs(gradients[i]["w"]))


def test_stable_spam_of_elements_follows_its_equations():
    rule = optclip.thresholds.ema_of_max(0.9)
    tx = optclip.clip_by_value(rule, response="proportional")
    gradients = methods.GRADIENTS
    found, _ = outputs_of(tx, gradients)
    expected = by_leaf(lambda: methods.StableSpamMax(0.9), gradients)
    assert_follow(found, gradients, expected)


def test_stable_spam_of_leaves_follows_its_equations():
    rule = optclip.thresholds.mean_over_rms()
    tx = optclip.clip_by(rule, over="leaf", response="normalize")
    gradients = methods.GRADIENTS
    found, _ = outputs_of(tx, gradients)
    expected = by_leaf(methods.StableSpamNorm, gradients)
    assert_follow(found, gradients, expected, most=1.0)


def test_stable_spam_is_both_and_then_adam_begun_anew():
    """Both, then Adam begun anew: the recipe is the chain of its parts."""
    tx = optclip.skip(recipes.stable_spam(optax.identity(), every=40))
    gradients = methods.GRADIENTS
    found, _ = outputs_of(tx, gradients)
    cut = by_leaf(methods.StableSpamMax, gradients)
    expected = by_leaf(methods.StableSpamNorm, cut)
    assert_follow(found, gradients, expected, most=1.0)
    begun, state = outputs_of(recipes.stable_spam(every=40), SOUND[:40])
    # The 40th update is Adam's first again: of length 1 an element.
    sizes = np.abs(np.concatenate([x.ravel() for x in begun[-1].values()]))
    assert np.median(sizes) == pytest.approx(1.0, rel=1e-3)
    assert optax.tree.get(state, "count") == 1


@pytest.mark.parametrize("growth", [1.0, 1.5])
def test_aggc_follows_its_equations(growth):
    high, low = (optax.linear_schedule(a, b, 200) for a, b in ((1.2, 1.0), (0.5, 0.8)))
    numbers = {"decay": 0.9, "min_norm": 0.3, "max_shrink": 0.2, "max_growth": growth}
    tx = recipes.aggc(GROUPS, high=high, low=low, **numbers)
    gradients = methods.GRADIENTS
    found, _ = outputs_of(optclip.skip(tx), gradients)
    oracle = methods.Aggc(1.0, 1.0, **numbers)
    expected, taken = [], 0
    for tree in gradients:
        # It counts the steps that it learns from, a schedule zeros too.
        oracle.high, oracle.low = float(high(taken)), float(low(taken))
        expected += scaled_by_norm(oracle, [tree])
        taken += is_sound(tree)
    assert_follow(found, gradients, expected, most=1.0)
    pairs = zip(expected, gradients, strict=True)
    grew = [norm_of(wanted) > 1.01 * norm_of(given) for wanted, given in pairs]
    assert (np.mean(grew) > 0.1) == (growth > 1)


def test_olmo_ratio_follows_its_equations():
    gradients = methods.GRADIENTS
    found, _ = outputs_of(recipes.olmo_ratio(1.1, 0.9), gradients)
    expected = scaled_by_norm(methods.OlmoRatio(1.1, 0.9), gradients)
    assert_follow(found, gradients, expected)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_acclip_follows_its_equations(alpha):
    gradients = methods.GRADIENTS
    tx = optclip.skip(recipes.acclip(b2=0.9, alpha=alpha))
    found, _ = outputs_of(tx, gradients)
    expected = by_leaf(lambda: methods.Acclip(b2=0.9, alpha=alpha), gradients)
    assert_follow(found, gradients, expected, rtol=2e-5, most=1.0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_stable_adamw_follows_its_equations(weight_decay):
    tx = optclip.skip(recipes.stable_adamw(b2=0.9, weight_decay=weight_decay))
    gradients = methods.GRADIENTS
    found, state = outputs_of(tx, gradients)
    oracles = {
        k: methods.StableAdamW(b2=0.9, weight_decay=weight_decay) for k in PARAMS
    }
    w = {k: x.astype(np.float32).astype(np.float64) for k, x in PARAMS.items()}
    expected = by_leaf_of(oracles, gradients, w)
    assert_follow(found, gradients, expected, rtol=2e-5, most=1.0)
    assert 0.1 < float(optclip.metrics(state)["clip/rate"]) < 0.9


@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
def test_spectra_follows_its_equations(method):
    """Both caps, in a warm-up of 100 steps and after it; outputs on the first axis."""
    rate = optax.warmup_constant_schedule(0.5, 2.0, 100)
    gradients = methods.GRADIENTS
    tx = recipes.spectra(
        optax.scale(2.0), 8.0, max_gradient=lambda step: 5.0 + 0.01 * step,
        learning_rate=rate, warmup=100, transposed=lambda path: True, method=method,
    )  # fmt: skip
    found, _ = outputs_of(tx, gradients)
    expected = []
    for i, tree in enumerate(gradients):
        up = 2.0 / float(rate(i)) if i < 100 else 1.0
        left = 2.0 * methods.spectra(tree["w"], up * (5.0 + 0.01 * i))
        w = methods.spectra(left.T, up * 8.0).T
        expected.append({"w": w, "b": methods.spectra(2.0 * tree["b"], up * 8.0)})
    assert_follow(found, gradients, expected, rtol=1e-4, most=1.0)


def test_clippy_follows_its_equations():
    gradients = [{k: 0.01 * x for k, x in tree.items()} for tree in methods.GRADIENTS]
    gradients = [
        {k: x.astype(np.float32).astype(np.float64) for k, x in tree.items()}
        for tree in gradients
    ]
    found, _ = outputs_of(recipes.clippy(), gradients)
    expected = [
        {k: g[k] * methods.clippy(g[k], PARAMS[k]) if is_sound(g) else g[k] for k in g}
        for g in gradients
    ]
    assert_follow(found, gradients, expected)


def test_uclip_follows_its_equations():
    gradients = methods.GRADIENTS
    found, _ = outputs_of(recipes.uclip(optclip.clip_by_value(3.0)), gradients)

    def clip(x):
        return np.clip(x, -3.0, 3.0)

    # Element by element: a bad one keeps what it carried, the others go on.
    oracles = {key: [methods.UClip(clip) for _ in x.flat] for key, x in PARAMS.items()}
    expected = []
    for tree in gradients:
        rows = {
            k: [o.step(g) for o, g in zip(oracles[k], x.flat, strict=True)]
            for k, x in tree.items()
        }
        expected.append({k: np.reshape(row, tree[k].shape) for k, row in rows.items()})
    # A spike is carried for hundreds of steps, with float32's rounding of its size.
    peak = max(np.max(np.abs(x)) for tree in SOUND for x in tree.values())
    assert_follow(found, gradients, expected, atol=peak * 2**-24, most=1.0)


def test_uclip_is_unbiased_on_average():
    """What came out is what went in, short of what is carried: no clip is."""
    tx = recipes.uclip(optclip.clip_by_global_norm(2.0))
    rng = np.random.default_rng(0)
    given = [{"x": rng.standard_t(3, size=3)} for _ in range(100)]
    found, state = outputs_of(tx, given, given[0])
    whole, left = (sum(tree["x"] for tree in trees) for trees in (given, found))
    assert np.any(np.abs(whole - left) > 1e-3)
    rest = state.feedback_residual["x"]
    np.testing.assert_allclose(left + rest, whole, rtol=1e-4, atol=1e-4)


def test_sclip_follows_its_equations():
    gradients = methods.GRADIENTS
    found, _ = outputs_of(recipes.sclip(2.0, 9.0), gradients)
    expected = by_leaf(lambda: methods.SClip(2.0, 9.0), gradients)
    assert_follow(found, gradients, expected, most=1.0)
    # The same by schedules, at their third step.
    tx = recipes.sclip(lambda step: 2.0 * step, lambda step: 4.5 * step)
    found, _ = outputs_of(tx, SOUND[:3])
    expected = by_leaf(lambda: methods.SClip(4.0, 9.0), SOUND[:3])
    np.testing.assert_allclose(found[2]["w"], expected[2]["w"], rtol=1e-5)


def test_auto_s_follows_its_equations():
    gradients = methods.GRADIENTS
    found, _ = outputs_of(recipes.auto_s(2.0, 0.5), gradients)
    expected = []
    for tree in gradients:
        scale = 2.0 / (norm_of(tree) + 0.5) if is_sound(tree) else np.nan
        expected.append({k: x * scale for k, x in tree.items()})
    assert_follow(found, gradients, expected, most=1.0)


def skips_of(tx, gradients, losses=None):
    """Whether each step was skipped."""

    @helpers.quick_jit
    def run(rows):
        def step(state, row):
            tree, loss = row
            extra = {} if losses is None else {"value": loss}
            out, state = tx.update(tree, state, as_jax(PARAMS), **extra)
            return state, (out, optclip.metrics(state)["skip/skipped"])

        return jax.lax.scan(step, tx.init(as_jax(PARAMS)), rows)[1]

    values = np.zeros(len(gradients)) if losses is None else losses
    outs, counts = run((stacked(gradients), np.float32(values)))
    found = list(np.diff(counts, prepend=0) > 0)
    for i, tree in enumerate(gradients):
        is_zero = not any(np.any(x[i]) for x in outs.values())
        assert is_zero == found[i] or not is_sound(tree) or not np.any(tree["w"])
    return found


@pytest.mark.parametrize("window", [8, 20, 128])
def test_olmo_skip_follows_its_equations(window):
    sigma = 2.0
    gradients, losses = methods.GRADIENTS, methods.LOSSES
    tx = recipes.olmo_skip(optax.identity(), sigma, window)
    found = skips_of(tx, gradients, losses)
    oracle = methods_steps.OlmoSkip(window, sigma)
    expected = [
        oracle.step(loss, norm_of(tree))
        for loss, tree in zip(losses, gradients, strict=True)
    ]
    # Ours forgets no loss for the norm's sake: leave out what follows such a step.
    bad = [not (is_sound(t) and np.isfinite(x)) for t, x in zip(gradients, losses, strict=True)]  # fmt: skip
    assert all(f for f, b in zip(found, bad, strict=True) if b)
    agree = np.mean([f == e for f, e in zip(found, expected, strict=True)])
    assert agree > 0.98
    assert 0.03 < np.mean(found) < 0.9
    assert found[150]


def test_axlearn_skip_follows_its_equations():
    gradients = methods.GRADIENTS
    found = skips_of(recipes.axlearn_skip(optax.identity(), 1.5, 0.9), gradients)
    oracle = methods_steps.AxlearnSkip(1.5, 0.9)
    expected = [
        oracle.step(norm_of(tree) if norm_of(tree) else float("nan"))
        for tree in gradients
    ]
    # A zero norm is no skip, and teaches the average nothing.
    expected = [e and norm_of(t) != 0 for e, t in zip(expected, gradients, strict=True)]
    assert found == expected
    assert 0.1 < np.mean(found) < 0.9


def test_megatron_skip_follows_its_equations():
    found = skips_of(recipes.megatron_skip(optax.identity(), 8.0), methods.GRADIENTS)
    expected = [not norm_of(tree) <= 8.0 for tree in methods.GRADIENTS]
    assert found == expected
    assert 0.1 < np.mean(found) < 0.9
