"""Whole methods beside what their authors' own code did, kept as JSON.

`tools/official` made the values. Where the authors' code does what their paper does
not, the difference is named and left out.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes, thresholds
from tests.support import helpers
from tools.official import (
    agc,
    aggc,
    autoclip,
    axlearn_skip,
    clippy,
    levanter,
    olmo_skip,
    spam,
    spectra,
    stable_spam,
    zclip,
)

FOLDER = pathlib.Path(__file__).with_name("official")


def kept(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def outputs_of(tx, inputs, extras=None):
    """What the transformation makes of each step, as NumPy float64; and its state."""

    @helpers.quick_jit
    def run(rows):
        def step(state, row):
            out, state = tx.update(row[0], state, **row[1])
            return state, out

        return jax.lax.scan(step, tx.init(jax.tree.map(lambda x: x[0], rows[0])), rows)

    rows = jax.tree.map(lambda *row: np.float32(row), *inputs)
    state, found = run((rows, extras or {}))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found), state


@pytest.mark.parametrize("name", ["default", "resets"])
def test_spam_clips_as_its_authors_code(name):
    options = spam.OPTIONS[name]
    values = kept("spam")
    every = options.get("DeltaT", 500)
    theta = float(options.get("threshold", 5000))
    tx = recipes.spam(optax.identity(), theta=theta, every=every, warmup=0)
    gradients = [np.array(g) for g in values["gradients"]]
    found, _ = outputs_of(tx, gradients)
    expected = np.array(values["clipped"][name])
    # The last element has no gradient at first: its code then cuts it to 0 for good.
    known = slice(0, 5)
    np.testing.assert_allclose(found[:, known], expected[:, known], rtol=1e-5)
    assert np.sum(expected[:, known] != np.array(gradients)[:, known]) >= 5
    assert np.all(expected[25:49, 5] == 0)
    assert np.any(found[25:49, 5] != 0)


@pytest.mark.parametrize("name", ["default", "resets", "short"])
def test_spam_warms_up_again_as_its_authors_code(name):
    options = spam.OPTIONS[name]
    warmup, every = options.get("warmup_steps", 150), options.get("DeltaT", 500)
    tx = optclip.with_periodic_reset(optax.identity(), every, warmup=warmup)
    found, _ = outputs_of(tx, [np.ones(()) for _ in range(120)])
    np.testing.assert_allclose(found, kept("spam")["scales"][name], rtol=1e-5)
    assert (np.min(found) < 0.02) == (name != "default")


@pytest.mark.parametrize("name", ["plain", "quick"])
def test_stable_spam_scales_as_its_authors_code(name):
    options = stable_spam.OPTIONS[name]
    decays = {"decay": options.get("gamma3", 0.999)}
    decays |= {"b1": options.get("gamma1", 0.7), "b2": options.get("gamma2", 0.9)}
    tx = recipes.stable_spam(optax.identity(), **decays)
    values = kept("stable_spam")
    found, _ = outputs_of(tx, [np.array(g) for g in values["gradients"]])
    np.testing.assert_allclose(found, values["scaled"][name], rtol=1e-5, atol=1e-9)
    cut = np.array(values["cut"][name]) != np.array(values["gradients"])
    assert np.mean(np.any(cut, axis=1)) > 0.1


def test_aggc_lets_the_first_step_pass():
    """Its code raises it to `min_norm`, before there is any average; here none is."""
    values = kept("aggc")
    assert np.max(values["scales"]["floor"][0]) > 1.5
    low, norms = aggc.OPTIONS["floor"]["low_mult"], np.array(values["norms"][0])
    tx = recipes.aggc(optclip.by_path(str), low=low, min_norm=1.0, max_growth=np.inf)
    found, _ = outputs_of(tx, [dict(zip("abc", norms, strict=True))])
    np.testing.assert_allclose([found[key][0] for key in "abc"], norms, rtol=1e-6)


@pytest.mark.parametrize("name", ["shrink", "both", "scheduled"])
def test_aggc_scales_as_its_authors_code(name):
    options = aggc.OPTIONS[name]
    values = kept("aggc")

    def over_time(first, last):
        early = options.get(first, 1.0)
        late = options.get(last, 0.0) or early
        if options.get("bounds_schedule", "none") == "none":
            return early
        switch = options.get("bounds_switch_ratio", 0.5)
        width = options.get("bounds_transition_ratio", 0.2)

        def at(step):
            part = jnp.clip((step / aggc.STEPS - switch) / width, 0.0, 1.0)
            return early * (1 - part) + late * part

        return at

    raises = options.get("raise_small", False)
    tx = recipes.aggc(
        optclip.by_path(lambda path: path),
        high=over_time("high_mult", "high_mult_late"),
        low=over_time("low_mult", "low_mult_late"),
        decay=options.get("ema_beta", 0.98),
        min_norm=options.get("min_norm", 0.0),
        max_shrink=options.get("max_down_scale", 0.0),
        max_growth=(options.get("max_up_scale", 0.0) or np.inf) if raises else 1.0,
    )
    norms = np.array(values["norms"])
    found, _ = outputs_of(tx, [dict(zip("abc", row, strict=True)) for row in norms])
    expected = norms * np.array(values["scales"][name])
    # A step of zeros is a norm of 1e-8 there, and lowers the average; here it does not.
    until = int(np.argmax(np.min(norms, axis=1) < 1e-6)) or len(norms)
    assert until >= 30
    for i, group in enumerate("abc"):
        ours, theirs = found[group][:until], expected[:until, i]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    changed = np.array(values["scales"][name])[:until] != 1
    assert np.mean(changed) > 0.1


@pytest.mark.parametrize("name", list(olmo_skip.OPTIONS))
def test_olmo_skips_as_its_authors_code(name):
    options = olmo_skip.OPTIONS[name]
    values = kept("olmo_skip")
    window = options.get("rolling_interval_length", 128)
    sigma = float(options.get("sigma_factor", 6))
    tx = recipes.olmo_skip(optax.identity(), sigma, window)
    norms = [np.array(n) for n in values["norms"]]
    extras = {"value": np.float32(values["losses"])}
    found, state = outputs_of(tx, norms, extras)
    skipped = np.array(values["skipped"][name])
    np.testing.assert_array_equal(found == 0, skipped)
    assert int(optclip.metrics(state)["skip/skipped"]) == np.sum(skipped) > 0


@pytest.mark.parametrize("name", list(autoclip.PERCENTILES))
def test_autoclip_clips_as_its_authors_code(name):
    values = kept("autoclip")
    norms = np.array(values["norms"])
    # PyTorch, which clips for them, adds 1e-6 to the norm.
    tx = recipes.autoclip(autoclip.PERCENTILES[name] / 100, eps=1e-6)
    found, state = outputs_of(tx, [norm * np.array([0.6, -0.8]) for norm in norms])
    left = np.array(values["left"][name])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), left, rtol=1e-5)
    assert 0.1 < np.mean(left < 0.999 * norms) < 0.95
    assert float(optclip.metrics(state)["clip/rate"]) > 0.1


@pytest.mark.parametrize("name", ["default", "tight"])
def test_axlearn_skips_as_its_authors_code(name):
    options, values = axlearn_skip.OPTIONS[name], kept("axlearn_skip")
    ratio = min(options["multipliers"])
    tx = recipes.axlearn_skip(optax.identity(), ratio, options["decay"])
    found, state = outputs_of(tx, [np.array(norm) for norm in values["norms"]])
    skipped = np.array(values["skipped"][name])
    np.testing.assert_array_equal(found == 0, skipped)
    bad = np.sum(~np.isfinite(values["norms"]))
    assert int(optclip.metrics(state)["skip/skipped"]) == np.sum(skipped) > bad


@pytest.mark.parametrize("name", list(levanter.OPTIONS))
def test_levanter_clips_as_its_authors_code(name):
    options, values = levanter.OPTIONS[name], kept("levanter")
    tx = recipes.mean_std_clip(
        options["sigma_factor"], options["rolling_interval_length"]
    )
    norms = np.array(values["norms"])
    found, state = outputs_of(tx, [norm * np.array([0.6, -0.8]) for norm in norms])
    left = np.array(values["left"][name])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), left, rtol=1e-5)
    clipped = left < 0.999 * norms
    # With its defaults the first spike alone that half a window came before.
    assert np.sum(clipped) == (1 if name == "default" else 41)
    rate = float(optclip.metrics(state)["clip/rate"])
    assert rate == pytest.approx(np.mean(clipped), abs=0.01)


@pytest.mark.parametrize("name", list(agc.RATIOS))
def test_agc_clips_as_its_authors_code(name):
    values = kept("agc")
    tx = recipes.agc(agc.RATIOS[name])
    update = helpers.quick_jit(lambda g, w: tx.update(g, tx.init(w), w)[0])
    changed = []
    rows = zip(values["params"], values["gradients"], values["left"][name], strict=True)
    for row in rows:
        w, g, left = ({k: np.float32(x) for k, x in tree.items()} for tree in row)
        found = update(g, w)
        for k in agc.SHAPES:
            np.testing.assert_allclose(found[k], left[k], rtol=1e-5)
            changed.append(np.any(left[k] != g[k]))
    assert 0.1 < np.mean(changed) < 0.99


@pytest.mark.parametrize("name", list(clippy.OPTIONS))
def test_clippy_shrinks_as_its_authors_code(name):
    values, tx = kept("clippy"), recipes.clippy(**clippy.OPTIONS[name])
    update = helpers.quick_jit(lambda u, w: tx.update(u, tx.init(w), w)[0])
    steps, params, left = map(
        np.float32, (values["steps"], values["params"], values["left"][name])
    )
    for u, w, expected in zip(steps, params, left, strict=True):
        np.testing.assert_allclose(update(u, w), expected, rtol=1e-5)
    assert 0.1 < np.mean(np.any(left != steps, axis=1)) < 0.99


def as_kernels(name, x):
    """What torch has as `(outputs, inputs)`, a batch of it or not, as JAX has it."""
    return x if name in ("embed", "bias") else np.swapaxes(x, -1, -2)


def spectra_rate(step):
    up, down = step / spectra.WARMUP, (spectra.STEPS - step) / spectra.DECAY
    return spectra.RATE * jnp.clip(up, 0, 1) * jnp.clip(down, 0, 1)


def spectra_cap(clip_c=1.0, clip_decay_type="constant", **options):
    if clip_decay_type == "constant":
        return clip_c
    length = int(options["clip_decay_fract"] * options["total_steps"])
    begin, share = options["total_steps"] - length, options["clip_final_scale"]
    if clip_decay_type == "linear":
        return optax.linear_schedule(clip_c, share * clip_c, length, begin)
    down = optax.cosine_decay_schedule(clip_c, length, share)
    return optax.join_schedules([optax.constant_schedule(clip_c), down], [begin])


@pytest.mark.parametrize("name", list(spectra.OPTIONS))
def test_spectra_takes_parameters_where_its_authors_code_does(name):
    options = spectra.OPTIONS[name]
    warmup = options.get("warmup_steps", 0)
    only_matrices = options.get("apply_to") != "all"
    tx = optax.chain(
        recipes.spectra(
            optax.scale_by_adam(b2=spectra.B2),
            spectra_cap(**options),
            max_gradient=spectra.MAX_GRADIENT if name == "gradients" else None,
            learning_rate=spectra_rate if warmup else None,
            warmup=warmup,
            transposed=lambda path: path == "embed",
            mask=(lambda tree: {k: x.ndim == 2 for k, x in tree.items()})
            if only_matrices
            else None,
        ),
        optax.add_decayed_weights(spectra.WEIGHT_DECAY),
        optax.scale_by_learning_rate(spectra_rate),
    )

    @helpers.quick_jit
    def run(params, rows):
        def step(both, grads):
            params, state = both
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, tx.init(params)), rows)

    inputs = ({k: np.float32(as_kernels(k, x)) for k, x in tree.items()}
              for tree in (spectra.start(), spectra.gradients()))  # fmt: skip
    (_, state), found = run(*inputs)
    for key, x in kept("spectra")[name].items():
        # A vector whose norm is below the cap, as it is in their warm-up, is not capped
        # there.
        if key == "bias" and warmup:
            continue
        theirs = as_kernels(key, np.array(x))
        ours = np.asarray(found[key], np.float64)[np.array(spectra.SHOWN) - 1]
        for one, other in zip(ours, theirs, strict=True):
            atol = 1e-5 * np.max(np.abs(other))
            np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=key)
    assert float(optclip.metrics(state)["clip/rate"]) > 0.9


ZCLIP = {
    "default": thresholds.zscore(max_norm=1.0),
    "uncapped": thresholds.zscore(),
    "mean": thresholds.zscore(mode="mean"),
    "percentile": thresholds.zscore(1.0, mode="percentile"),
    "skip": thresholds.zscore(decay=0.9, skip_spikes=True),
}


@pytest.mark.parametrize("name", list(zclip.OPTIONS))
def test_zclip_clips_as_its_authors_code(name):
    values = kept("zclip")
    norms = np.array(values["norms"])
    # It adds 1e-6 to the norm that it divides by.
    tx = optclip.clip_by_global_norm(ZCLIP[name], eps=1e-6)
    found, _ = outputs_of(tx, [norm * np.array([0.6, -0.8]) for norm in norms])
    left = np.linalg.norm(found, axis=1)
    # A spike stays in mean and variance for long; float32 loses 1.6e-5 in the norm
    # minus that mean, by which the variance is divided.
    np.testing.assert_allclose(left, values["left"][name], rtol=4e-5)
    assert np.sum(left < 0.99 * norms) > 20
