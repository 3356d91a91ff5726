"""What the text of each notebook states about the runs in it.

The code runs in the notebook's kernel after its last cell, so that readers need not
read past asserts and no network is trained twice.
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
}
