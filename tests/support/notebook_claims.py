"""Check the statements of each notebook about its runs.

The code runs in the notebook's kernel after its last cell, so that notebooks contain no
asserts and no network is trained twice.
"""

CLAIMS = {
    "01_quickstart": """
assert skipped.tolist() == corrupted.tolist()
assert abs(exact_norm(clip_with_optclip(leaves, 1.0)) - 1) < 2e-3
""",
    "02_choosing_a_threshold": """
medians = np.median(losses, axis=1)
assert suggestion.quantiles[0.5] < suggestion.max_norm < 0.5 * norms[weights > 1].min()
assert (losses[:-1] < 4).all()
assert not (losses[-1] <= 2 * losses[:-1].max()).any()
assert medians[:3].min() < medians[3]
assert (rates[:3] > 0.9).all()
assert (abs(rates[4] - 1 / 20) < 0.02).all()
assert np.allclose(losses[1], second, atol=0.01)
assert diverged.max_norm > suggestion.max_norm
assert np.ptp(adam_losses[:-1]) < 0.1
assert adam_losses[-1] > adam_losses[:-1].max()
""",
    "03_adaptive_clipping": """
assert norms[SPIKE] > 2 * usual
assert np.isnan(norms[EMPTY])
assert all(log["clip/coefficient"][SPIKE] < 1 for log in logs.values())
assert np.isclose(logs["aggc"]["clip/coefficient"][SPIKE], 0.9)
learned = {name: log["clip/threshold"] for name, log in logs.items()}
assert learned["aggc"][SPIKE + 1] > learned["aggc"][SPIKE - 1]
assert learned["zclip"][0] == 1
assert learned["mean_std_clip"][64] > learned["mean_std_clip"][SPIKE - 1]
assert np.isinf(learned["mean_std_clip"][:64]).all()
assert np.isfinite(learned["adagc"][100:]).all()
for name in ("autoclip", "adagc", "olmo_ratio"):
    assert learned[name][SPIKE + 1] < 1.1 * learned[name][SPIKE - 1]
for name, log in logs.items():
    often = (log["clip/coefficient"][110:] < 1).mean()
    assert (often > 0.5) == (name in ("autoclip", "adagc", "aggc"))
without = jax.device_get(replay_all(np.delete(norms, EMPTY)))
for name, log in without.items():
    threshold = np.delete(learned[name], EMPTY)
    assert np.allclose(threshold, log["clip/threshold"], rtol=1e-5)
    assert np.isnan(logs[name]["clip/coefficient"][EMPTY])
increases = {name: x[SPIKE + 1 : SPIKE + 11].mean() for name, x in harm.items()}
assert all(increases["Adam alone"] > increases[name] for name in shown)
counts = hit["olmo_skip"]["skip/skipped"]
assert counts[SPIKE] == counts[SPIKE - 1] + 1
assert same(after.skip_inner, state.skip_inner)
assert not same(moved, state.skip_inner)
""",
    "04_sharded_training": """
assert abs(norm / norm_unsharded - 1) < 1e-6
for name in grads:
    assert clipped[name].sharding.is_equivalent_to(shardings[name], grads[name].ndim)
assert abs(whole / norm_unsharded - 1) < 1e-6
np.testing.assert_allclose(norms_declared(axis_name=specs), norm_unsharded, rtol=1e-6)
assert difference < 1e-3
""",
    "05_custom_clip": """
assert isinstance(rule, thresholds.Rule)
assert difference < 1e-4
assert np.isinf(replayed["clip/threshold"][:10]).all()
assert (replayed["clip/coefficient"][[120, 121, 200]] < 0.2).all()
assert np.allclose(np.delete(with_nan, 50), without, rtol=1e-4)
logarithms = np.where(sizes > 1, 1 + np.log(np.maximum(sizes, 1)), sizes)
np.testing.assert_allclose(results, logarithms, rtol=1e-6)
np.testing.assert_allclose(slope, np.minimum(1, 1 / sizes), rtol=1e-5)
np.testing.assert_allclose(slope[2:], (quotient / (2 * step))[2:], rtol=1e-3)
assert np.isfinite(jax.grad(after)(0.0))
np.testing.assert_allclose(
    clipped, [-1 - np.log(10), -0.5, 0.5, 1 + np.log(10)], rtol=1e-6
)
unclipped_loss = losses.pop("unclipped")
assert not any(unclipped_loss <= loss + 0.1 for loss in losses.values())
free, cut = recorded.values()
assert free.cotangent_norm[0] > 100 * free.cotangent_norm[-1]
assert cut.cotangent_norm.max() < free.cotangent_norm.max() / 100
assert free.cotangent_clipped.sum() == 0 < cut.cotangent_clipped.sum()
""",
    "06_from_tensorflow_and_pytorch": """
def fit_in_numpy(clip):
    kernel, bias = np.zeros((4, 1)), np.zeros(1)
    for _ in range(STEPS):
        errors = 2 * (inputs.astype(float) @ kernel + bias - targets) / len(inputs)
        steps = clip(inputs.T.astype(float) @ errors, errors.sum(axis=0))
        kernel, bias = kernel - 0.1 * steps[0], bias - 0.1 * steps[1]
    return {"kernel": kernel, "bias": bias}


def by_norm(*arrays):
    return [x / max(np.linalg.norm(x), 1.0) for x in arrays]


def by_global_norm(*arrays):
    norm = np.sqrt(sum(np.sum(x**2) for x in arrays))
    return [x / max(norm, 1.0) for x in arrays]


assert norms[0] > 1
for actual, clip in (
    (capped, lambda *arrays: [np.clip(x, -1, 1) for x in arrays]),
    (taped, by_global_norm),
    (fitted["clipvalue=0.5"], lambda *arrays: [np.clip(x, -0.5, 0.5) for x in arrays]),
    (fitted["clipnorm=1.0"], by_norm),
):
    same(actual, fit_in_numpy(clip), rtol=1e-5)
same(by_row.data, np.array([[0.6, 0.8], [0.6, 0.8]]))
np.testing.assert_allclose(with_eps["x"] / tiny["x"], 1e-9 / (1e-9 + 1e-6), rtol=1e-4)
assert jnp.array_equal(without["x"], tiny["x"])
assert not any(np.any(x) for x in jax.tree.leaves(policies["zero"]))
for limit in limits[::50]:
    assert jnp.array_equal(F.clip_by_global_norm(x, limit)[0], x)
""",
    "07_choosing_a_method": """
for repaired in (by_norm, by_adagc, by_skip):
    assert (repaired < unclipped).all()
assert (skip_log["skip/skipped"][:, -1] >= 1).all()
assert np.isnan(with_nan).all()
assert (nan_skipped < clean + 0.05).all()
for diverged in recurrent[:2]:
    assert not (diverged <= 3).all()
assert (recurrent[2] < 3).all()
for trains, loss in zip((False, True, True, False, True), deep_losses, strict=True):
    assert (loss < 4).all() == trains
assert not half["optax"] <= 4
assert half["optclip"] < 3
assert np.median(reached[1]) > np.median(reached[0])
assert not distance[0].mean() <= distance[1].mean()
for loss in (english_loss.mean(axis=1), code_loss.mean(axis=1)):
    assert not (loss[:4] <= loss[4]).any()
means = expert_losses.mean(axis=1)
assert not (means[:3] <= means[3]).any()
assert rates["max_norm=0.05"] > 0.99
assert 0.02 < rates["max_norm=0.5"] < 0.4
assert rates["max_norm=10"] < 0.02
""",
    "08_attention_and_singular_values": """
assert np.max(without["logits"]) > 1.5 * LIMIT
assert np.max(clipped["logits"]) < 1.5 * LIMIT
difference = np.mean(clipped["loss"][-20:]) - np.mean(without["loss"][-20:])
assert difference < 0.1
recorded = clipped["attention/coefficient/attn"]
assert np.allclose(recorded, coefficients.min(axis=1), rtol=1e-5)
assert coefficients.min() > 0.6
assert (after["attn"] < LIMIT * 1.0001).all()
assert np.allclose(spectra["hard"], np.minimum(original, 1), atol=1e-4)
assert np.allclose(spectra["smooth"], original / np.sqrt(1 + original**2), atol=1e-4)
for name in ("spectral norm", "global norm"):
    assert np.allclose(spectra[name], original / 1000, rtol=1e-3, atol=1e-7)
assert max(steps["SPECTRA"]) < np.sqrt(96 / 64) * 1.001
assert steps["Adam"][20] > 2 * steps["SPECTRA"][20]
""",
    "09_private_training": """
assert moved <= f.sensitivity("replace_one")
assert moved_unclipped > 20
assert min(ordinary) > 0.9
assert np.mean(table[1.0, "adaptive"]) > 0.8
assert np.mean(table[4.0, "10"]) < np.mean(table[4.0, "adaptive"]) + 0.02
assert epsilon_of(1.0) > epsilon_of(4.0) > 0
below = np.nanmean(np.where(is_padding, np.nan, norms <= thresholds[:, None]), axis=1)
assert abs(np.median(below[-50:]) - 0.5) < 0.1
""",
    "10_black_box": """
assert num_skipped == 1
assert recorded["step"][at] == 200
assert np.isnan(recorded["clip/norm"][at])
assert "times the median, in step 200." in optclip.summary(recorded)
assert found.findings == ["100.0% of the gradient is example 17."]
assert str(damaged).startswith(f"Parameters: row {row} of `embed` has 3")
""",
}
