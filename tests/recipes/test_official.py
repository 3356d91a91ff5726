"""Compare whole methods with values that their authors' own code computed.

`python -m tests.recipes.official` made the JSON files. Where the authors' code deviates from
their paper, the test names and excludes the difference.
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
from tests.recipes.official import (
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
)
from tests.support import covering, helpers
from tests.support.running_rules import DIRECTION
from tests.support.steps import over_steps, unstacked

FOLDER = pathlib.Path(__file__).with_name("official")


# A zero enters the averages of the authors' code, but not those of optclip. This number
# takes the place of zeros: it enters both.
TINY = 1e-12


def recorded(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def outputs_of(tx, gradients, params=None, **extra):
    """Return the updates of each step in float64, and all states."""
    updates, states = over_steps(
        tx, *jax.tree.map(np.float32, (gradients, params)), **extra
    )
    return helpers.as_float64(updates), states


@pytest.mark.parametrize("name", list(spam.OPTIONS))
def test_spam_clips_and_warms_up_again_as_authors_code(name):
    options, values = spam.OPTIONS[name], recorded("spam")
    warmup, every = options.get("warmup_steps", 150), options.get("DeltaT", 500)
    tx = optclip.with_periodic_reset(optax.identity(), every, warmup=warmup)
    factors, _ = outputs_of(tx, np.ones(120))
    np.testing.assert_allclose(factors, values["scales"][name], rtol=1e-5)
    assert (np.min(factors) < 0.02) == (name != "default")
    if name in values["clipped"]:
        theta = float(options.get("threshold", 5000))
        tx = recipes.spam(optax.identity(), theta=theta, every=every, warmup=0)
        # The last element has no gradient at first: the authors' code cuts it to 0.
        gradients, expected = (
            np.array(x)[:, :5] for x in (values["gradients"], values["clipped"][name])
        )
        np.testing.assert_allclose(outputs_of(tx, gradients)[0], expected, rtol=1e-5)
        assert np.sum(expected != gradients) >= 5


@pytest.mark.parametrize("name", ["plain", "quick"])
def test_stable_spam_scales_as_authors_code(name):
    options, values = stable_spam.OPTIONS[name], recorded("stable_spam")
    tx = recipes.stable_spam(
        optax.identity(), decay=options.get("gamma3", 0.999),
        b1=options.get("gamma1", 0.7), b2=options.get("gamma2", 0.9),
    )  # fmt: skip
    gradients = np.array(values["gradients"])
    is_zero = ~np.any(gradients, axis=1)
    updates, _ = outputs_of(tx, np.where(is_zero[:, None], TINY, gradients))
    scaled = np.array(values["scaled"][name])
    np.testing.assert_allclose(updates[~is_zero], scaled[~is_zero], 1e-5, 1e-9)
    cut = np.array(values["cut"][name]) != np.array(values["gradients"])
    assert np.mean(np.any(cut, axis=1)) > 0.1


def edge_over_time(options, name):
    """Return an edge of AGGC's band: a number, or a ramp to its late value."""
    early = options.get(name, 1.0)
    late = options.get(f"{name}_late", 0.0) or early
    if "bounds_schedule" not in options:
        return early
    # The authors' default: from half of the steps on, over a fifth of them.
    half, fifth = aggc.STEPS / 2, aggc.STEPS / 5
    return lambda step: early + (late - early) * jnp.clip((step - half) / fifth, 0, 1)


@pytest.mark.parametrize("name", ["shrink", "both", "scheduled"])
def test_aggc_scales_as_authors_code(name):
    options, values = aggc.OPTIONS[name], recorded("aggc")
    tx = recipes.aggc(
        optclip.by_path(str),
        high=edge_over_time(options, "high_mult"),
        low=edge_over_time(options, "low_mult"),
        decay=options.get("ema_beta", 0.98),
        min_norm=0.0,
        max_shrink=options.get("max_down_scale", 0.0),
        max_growth=options.get("max_up_scale", 1.0),
    )
    norms = np.array(values["norms"])
    # There a step of zeros counts as norms of 1e-8, which lower the average.
    norms = norms[: np.argmax(np.min(norms, axis=1) < 1e-6) or None]
    scales = np.array(values["scales"][name])[: len(norms)]
    assert len(norms) >= 30
    updates, _ = outputs_of(tx, dict(zip("abc", norms.T, strict=True)))
    for i, group in enumerate("abc"):
        np.testing.assert_allclose(updates[group], (norms * scales)[:, i], rtol=1e-5)
    assert np.mean(scales != 1) > 0.1


# The names of arguments in the authors' code, in the order of those of the recipes.
OURS = {"sigma_factor": "sigma", "rolling_interval_length": "window"}
SKIPS = [
    *(
        (
            *("olmo_skip", key),
            recipes.olmo_skip(optax.identity(), **{OURS[k]: x[k] for k in x}),
        )
        for key, x in olmo_skip.OPTIONS.items()
    ),
    *(
        (
            *("axlearn_skip", key),
            recipes.axlearn_skip(optax.identity(), min(x["multipliers"]), x["decay"]),
        )
        for key, x in axlearn_skip.OPTIONS.items()
    ),
]


@pytest.mark.parametrize(("method", "name", "tx"), SKIPS)
def test_step_is_skipped_as_in_authors_code(method, name, tx):
    values = recorded(method)
    norms, skipped = np.array(values["norms"]), np.array(values["skipped"][name])
    extra = {"value": np.float32(values["losses"])} if "losses" in values else {}
    updates, states = outputs_of(tx, norms, **extra)
    np.testing.assert_array_equal(updates == 0, skipped)
    assert optclip.metrics(unstacked(states)[-1])["skip/skipped"] == np.sum(skipped)
    assert np.any(skipped & np.isfinite(norms))


# PyTorch, which clips for the authors of AutoClip and ZClip, adds 1e-6 to the norm.
NORMS = [
    *(
        ("autoclip", name, recipes.autoclip(q / 100, eps=1e-6), 0.1)
        for name, q in autoclip.PERCENTILES.items()
    ),
    # With its defaults, Levanter clips the first spike after half a window, and no
    # other.
    *(
        (
            *("levanter", name),
            recipes.mean_std_clip(x["sigma_factor"], x["rolling_interval_length"]),
            least,
        )
        for (name, x), least in zip(levanter.OPTIONS.items(), (1e-3, 0.1), strict=True)
    ),
    ("zclip", "default", recipes.zclip(eps=1e-6), 0.05),
    ("zclip", "uncapped", recipes.zclip(max_norm=None, eps=1e-6), 0.05),
    *(
        ("zclip", name, optclip.clip_by_global_norm(rule, eps=1e-6), 0.05)
        for name, rule in {
            "mean": thresholds.zscore(mode="mean"),
            "percentile": thresholds.zscore(1.0, mode="percentile"),
            "skip": thresholds.zscore(decay=0.9, skip_spikes=True),
        }.items()
    ),
]


@pytest.mark.parametrize(("method", "name", "tx", "least"), NORMS)
def test_norm_is_clipped_as_in_authors_code(method, name, tx, least):
    values = recorded(method)
    norms, left = np.array(values["norms"]), np.array(values["left"][name])
    updates, _ = outputs_of(tx, np.maximum(norms, TINY)[:, None] * DIRECTION)
    # A spike stays in ZClip's mean for long; in float32 the norm minus that mean, by
    # which the variance is divided, loses 1.6e-5.
    rtol = 4e-5 if method == "zclip" else 1e-5
    clipped = np.linalg.norm(updates, axis=1)
    np.testing.assert_allclose(clipped, left, rtol=rtol, atol=2 * TINY)
    assert least < np.mean(left < 0.99 * norms) < 0.95


STEPS = [
    *(("agc", name, recipes.agc(ratio)) for name, ratio in agc.RATIOS.items()),
    *(("clippy", name, recipes.clippy(**x)) for name, x in clippy.OPTIONS.items()),
]


@pytest.mark.parametrize(("method", "name", "tx"), STEPS)
def test_update_is_clipped_by_parameters_as_in_authors_code(method, name, tx):
    values = recorded(method)
    given = values["gradients" if method == "agc" else "steps"]
    given, params, left = (
        {key: np.float32([row[key] for row in rows]) for key in rows[0]}
        if isinstance(rows[0], dict)
        else {"": np.float32(rows)}
        for rows in (given, values["params"], values["left"][name])
    )
    updates, _ = outputs_of(tx, given, params)
    for key, expected in left.items():
        np.testing.assert_allclose(updates[key], expected, rtol=1e-5)
    changed = [
        np.any(left[key][i] != x[i]) for key, x in given.items() for i in range(len(x))
    ]
    assert 0.1 < np.mean(changed) < 0.99


def as_kernel(name, x):
    """Transpose a kernel, which PyTorch stores as `(outputs, inputs)`."""
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


# The quick run excludes the default cap and its linear schedule.
@pytest.mark.parametrize("name", list(spectra.OPTIONS) if covering.full else ["all"])
def test_spectra_updates_parameters_as_authors_code(name):
    options = spectra.OPTIONS[name]
    warmup = options.get("warmup_steps", 0)
    tx = optax.chain(
        recipes.spectra(
            optax.scale_by_adam(b2=spectra.B2),
            spectra_cap(**options),
            max_gradient=spectra.MAX_GRADIENT if name == "gradients" else None,
            learning_rate=spectra_rate if warmup else None,
            warmup=warmup,
            transposed=lambda path: path == "embed",
            mask=None
            if options.get("apply_to") == "all"
            else lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree),
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

    inputs = (
        {key: np.float32(as_kernel(key, x)) for key, x in tree.items()}
        for tree in (spectra.start(), spectra.gradients())
    )
    (_, state), params = run(*inputs)
    for key, x in recorded("spectra")[name].items():
        # In their warm-up a vector whose norm is below the cap is not capped.
        if key == "bias" and warmup:
            continue
        expected = as_kernel(key, np.array(x))
        found = np.asarray(params[key], np.float64)[np.array(spectra.SHOWN) - 1]
        axes = tuple(range(1, expected.ndim))
        room = 1e-5 * np.max(np.abs(expected), axis=axes, keepdims=True)
        assert np.all(np.abs(found - expected) <= room), key
    assert float(optclip.metrics(state)["clip/rate"]) > 0.9
