"""Test that plots show what was recorded, from any form of a history."""

import json
import sys

import matplotlib as mpl
import numpy as np
import optax
import pytest

import optclip
from optclip import plot
from tests.support import steps

mpl.use("Agg")
import matplotlib.pyplot as plt

NORMS = [1.0, 3.0, float("nan"), 50.0, 2.0]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def recorded(tx, norms=NORMS):
    """Return stacked metrics of a run over gradients of these norms."""
    norms = np.float32(norms)[:, None]
    return steps.history(
        tx, {"a": norms * np.float32(0.6), "b": norms * np.float32(0.8)}
    )[1]


@pytest.fixture(scope="module")
def history():
    return steps.unstacked(recorded(optclip.clip_by_global_norm(2.0)))


def lines(ax):
    return {line.get_label(): np.asarray(line.get_ydata(), float) for line in ax.lines}


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def history_of(norms, threshold=1.0, coefficient=1.0):
    names = "clip/norm", "clip/threshold", "clip/coefficient"
    arrays = np.broadcast_arrays(norms, threshold, coefficient)
    return dict(zip(names, arrays, strict=True))


def test_norms_draws_norms_before_and_after_and_threshold(history):
    ax = plot.norms(history)
    drawn = lines(ax)
    np.testing.assert_allclose(drawn["before"], [1, 3, np.nan, 50, 2], rtol=1e-6)
    np.testing.assert_allclose(drawn["after"], [1, 2, np.nan, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(drawn["threshold"], 2.0)
    bad = next(line for line in ax.lines if line.get_label() == "not finite")
    assert list(bad.get_xdata()) == [2]
    assert ax.get_yscale() == "log"
    # One clip needs no name.
    assert (ax.get_xlabel(), ax.get_title()) == ("step", "")
    assert plot.norms(history_of([1.0, 3.0])).get_yscale() == "linear"


def test_norms_marks_step_between_two_nonfinite():
    norms = [1.0, 2.0, np.nan, 3.0, np.nan, 4.0, 5.0, np.nan, 6.0]
    before, _, threshold, _ = plot.norms(history_of(norms)).lines
    assert before.get_markevery() == [3, 8]
    assert threshold.get_marker() == "None"


def test_norms_excludes_infinite_threshold():
    """The largest float clips nothing either."""
    assert "threshold" not in lines(plot.norms(history_of([1.0, 2.0], np.inf)))
    largest = np.finfo(np.float32).max
    ax = plot.norms(history_of([0.0, np.nan, 4.0], [1.0, largest, 1.0]))
    assert ax.get_ylim()[1] < 1e3


def test_norms_of_many_norms_draws_fraction_clipped():
    """One of the norms, its threshold and its coefficient would hide the others."""
    found = recorded(optclip.clip_by_norm(2.0))
    ax = plot.norms(found)
    assert set(lines(ax)) == {"each step", "not finite"}
    np.testing.assert_allclose(lines(ax)["each step"], [0, 0.5, 0, 1, 0])
    assert ax.get_title() == "30% of the norms clipped on average"
    assert ax.get_ylabel() == "fraction of the norms clipped"
    ax = plot.distribution(found)
    assert (labels(ax), ax.get_xlabel()) == ([], "most clipped norm of each step")
    fraction = np.tile([0.0, 0.0, 0.25, 0.75], 10)
    drawn = lines(plot.norms(history_of(np.ones(40)) | {"clip/fraction": fraction}))
    expected = [fraction[i - 24 : i + 1].mean() for i in range(24, 40)]
    np.testing.assert_allclose(drawn["mean of the last 25 steps"], expected)


def test_norms_draws_norms_where_they_belong_to_one():
    """A norm above the threshold that is not clipped belongs to another unit."""
    norms, coefficients, fraction = [1.0, 4.0], [1.0, 0.5], np.array([0.0, 1.0])
    leaf = history_of(norms, 2.0, coefficients) | {"clip/fraction": fraction}
    for found, expected in (
        (leaf, ["before", "after", "threshold"]),
        (leaf | {"clip/fraction": fraction / 2}, ["each step"]),
        (leaf | {"clip/norm": np.array([3.0, 4.0])}, ["each step"]),
    ):
        named = {f"{key}/a": x for key, x in found.items()}
        assert labels(plot.norms(named, part="a")) == expected
    unclipped = history_of(norms, np.inf) | {"clip/fraction": 0 * fraction}
    assert labels(plot.norms(unclipped)) == ["largest norm"]


def test_history_may_be_steps_stacked_or_a_file(history, tmp_path):
    file = tmp_path / "run.jsonl"
    plot.save(history, file)
    rows = file.read_text().splitlines()
    assert json.loads(rows[1])["clip/norm"] == 3.0
    # NaN and inf are no JSON.
    assert json.loads(rows[2], parse_constant=pytest.fail)["clip/norm"] == "nan"
    stacked = {key: np.stack([h[key] for h in history]) for key in history[0]}
    expected = lines(plot.norms(history))
    for form in (stacked, file, str(file), tuple(history)):
        for key, values in lines(plot.norms(form)).items():
            np.testing.assert_array_equal(values, expected[key])


def test_saved_history_keeps_other_numbers(history, tmp_path):
    """The log also has text, arrays, and a number of one step."""
    losses = [np.float32(1.5), np.float32(np.inf), *range(2, len(history))]
    more = [{"loss": x, "name": "a", "all": [[1], [2, 3]]} for x in losses]
    more[1]["eval"] = 7
    steps = [h | x for h, x in zip(history, more, strict=True)]
    columns = {key: np.stack([h[key] for h in history]) for key in history[0]}
    for form in (steps, columns | {"loss": np.float32(losses), "all": np.ones(2)}):
        plot.save(form, tmp_path / "run.jsonl")
        plot.save(tmp_path / "run.jsonl", tmp_path / "again.jsonl")
        rows = [
            json.loads(x) for x in (tmp_path / "again.jsonl").read_text().splitlines()
        ]
        assert [row["loss"] for row in rows[:3]] == [1.5, "inf", 2.0]
        assert not {"name", "all"} & set(rows[0])
        assert [row.get("eval") for row in rows[:2]] in ([None, 7.0], [None, None])


@pytest.mark.parametrize("draw", [plot.norms, plot.rate, plot.heatmap])
def test_history_with_other_keys_is_read_by_step(draw):
    """The history has text, cotangents, every tenth step, and numbers of one step."""
    others = {"loss": "?", **optclip.metrics(optclip.cotangent_probe())}
    tx = optclip.clip_by_group_norm(1.0, {"a": "first", "b": "second"})
    found = [
        {**h, **others, "step": 10 * i} | ({} if i else {"held": 1, "eval/loss": 2})
        for i, h in enumerate(steps.unstacked(recorded(tx)))
    ]
    if draw is plot.heatmap:
        assert tuple(draw(found).images[0].get_extent()[:2]) == (-5, 45)
    else:
        line = draw(found, part="first").lines[0]
        assert list(line.get_xdata()) == [0, 10, 20, 30, 40]


def test_rate_draws_fraction_over_window():
    """A norm of 0 is not clipped. Windows of a thinned history are of records."""
    found = history_of([1, 3, 3, 0, 1], 2.0, [1, 2 / 3, 2 / 3, 0, 1])
    drawn = lines(plot.rate(found, window=2))
    np.testing.assert_allclose(drawn["so far"], [0, 1 / 2, 2 / 3, 1 / 2, 2 / 5])
    np.testing.assert_allclose(drawn["last 2 steps"], [0, 1 / 2, 1, 1 / 2, 0])
    assert list(lines(plot.rate(found))) == ["so far"]
    found = spiky(np.arange(0, 1000, 10), 10)
    assert labels(plot.rate(found, clip="clip", window=20))[1] == "last 20 records"


def test_plot_of_long_run_has_legend_without_warning():
    """It has a frame in a corner. Matplotlib warns if it searches a place for long."""
    ax = plot.norms(history_of(np.geomspace(0.5, 2.0, 100_001)))
    ax.figure.canvas.draw()
    assert ax.get_legend().get_frame_on()
    assert not plot.norms(history_of([1.0, 2.0])).get_legend().get_frame_on()


def test_plot_labels_whole_steps_and_counts_only():
    axes = [draw([history_of(1.0)]).xaxis for draw in (plot.norms, plot.rate)]
    for axis in (*axes, plot.distribution(history_of([1.0, 2.0])).yaxis):
        assert all(x == round(x) for x in axis.get_majorticklocs())
    # Ticks that the user has set stay.
    ax = plt.figure().add_subplot(xticks=[0.0, 0.5], yticks=[0.0, 0.5])
    assert [*plot.rate(history_of(1.0), ax=ax).get_xticks()] == [0, 0.5]
    assert [*plot.distribution(history_of(1.0), ax=ax).get_yticks()] == [0, 0.5]


def test_rate_of_many_norms_equals_rate_of_metrics():
    tx = optclip.clip_by(1.0, over="leaf", response="normalize")
    tree = {"a": np.float32([0.5]), "b": np.zeros(1, np.float32)}
    _, state = tx.update(tree, tx.init(tree))
    found = optclip.metrics(state)
    assert lines(plot.rate([found]))["so far"][-1] == found["clip/rate"] == 1


def test_distribution_has_each_finite_norm_once(history):
    ax = plot.distribution(history)
    assert sum(patch.get_height() for patch in ax.patches) == 4
    assert labels(ax) == ["threshold 2: above 25% of the norms"]
    assert not labels(plot.distribution(history_of([3.0], np.inf)))


def test_heatmap_has_a_row_per_leaf():
    tx = optclip.clip_by_norm(np.inf, record="leaves", name="watch")
    found = recorded(optax.chain(tx, optclip.clip_by_global_norm(1.0)))
    ax = plot.heatmap(found, clip="watch")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a"]
    # The name may be omitted if only one record has leaves.
    assert plot.heatmap(found).get_title() == "norms recorded by 'watch'"
    shown = ax.images[0].get_array()
    assert list(np.ma.getmaskarray(shown)[0]) == [False, False, True, False, False]
    expected = np.outer([0.8, 0.6], [1, 3, 50, 2])
    np.testing.assert_allclose(shown[:, [0, 1, 3, 4]], expected, rtol=1e-5)


def test_heatmap_shows_sixty_leaves_and_two_hundred_steps():
    found = {f"clip/norm/w{i}": np.full(1000, i + 1.0) for i in range(70)}
    found["clip/norm/w69"] = np.full(1000, np.nan)
    ax = plot.heatmap(found)
    assert ax.images[0].get_array().shape == (60, 200)
    assert ax.get_title() == "norms recorded by 'clip', the largest 60 of 70"
    assert ax.get_yticklabels()[0].get_text() == "w68"


def test_heatmap_colors_exclude_norms_of_rounding_noise():
    """A norm that was large in another step counts, as before a layer is frozen."""
    decay = np.geomspace(1e3, 1e-5, 9)
    kernels = {"clip/norm/k": decay, "clip/norm/q": 2e-6 * decay}
    image = plot.heatmap(kernels | {"clip/norm/key_bias": 1e-9 * decay}).images[0]
    np.testing.assert_allclose(image.get_clim(), [2e-11, 1e3])
    assert image.colorbar.extend == "min"
    assert plot.heatmap(kernels).images[0].get_clim() == image.get_clim()


@pytest.mark.parametrize("draw", [plot.norms, plot.rate, plot.distribution])
def test_plot_of_several_clips_without_name_raises(draw):
    groups = optclip.clip_by_group_norm(1.0, {"a": "first", "b": "second"})
    found = recorded(optax.chain(groups, optclip.clip_by_global_norm(1.0, name="all")))
    _, ax = plt.subplots()
    assert draw(found, clip="all", ax=ax) is ax
    assert ax.get_title() == "all"
    assert draw(found, clip="clip", part="second").get_title() == "clip/second"
    for names, words in (
        ({}, r"`clip` must be one of \['all', 'clip'\], got None"),
        ({"clip": "clip", "part": "third"}, r"`part` must be one of \['first', 'seco"),
        ({"clip": "all", "part": "third"}, "has no groups or leaves"),
    ):
        with pytest.raises(ValueError, match=words):
            draw(found, **names)


NO_NORM = "has no finite norm above 0"
LEAVES = {"clip/norm/a": 0.0, "clip/norm/b": np.nan}


@pytest.mark.parametrize(
    ("draw", "given", "words"),
    [
        (plot.norms, {}, "`history` is empty"),
        (plot.norms, [{"clip/norm": 1.0}, {"loss": 1.0}], r"same keys in each step, .* 0 and 1 has \['clip/norm'\]"),
        (plot.norms, {3: [1.0]}, "has no clipping norms"),
        (plot.norms, {"clip/norm": [1.0], "clip/coefficient": [1.0]}, "must have the norm, threshold and .* got only its norm and coefficient"),
        (plot.norms, {"clip/norm": np.ones((2, 3))}, r"an array of shape \(2, 3\)"),
        (plot.norms, {"clip/norm": [1.0]}, "must have the norm, threshold and coefficient of 'clip', got only its norm"),
        (plot.distribution, history_of([0.0]), NO_NORM),
        (plot.heatmap, [LEAVES], NO_NORM),
        (plot.heatmap, history_of([1.0]), "'clip' has one norm per step, but a heatmap needs"),
        (plot.norms, '{"clip/norm": 1.0}\n{"clip/no', r"Line 2 of .*run.jsonl is not JSON: .*clip/no"),
    ],
)  # fmt: skip
def test_plot_rejects_malformed_history_or_file(draw, given, words, tmp_path):
    if isinstance(given, str):
        (tmp_path / "run.jsonl").write_text(given)
        given = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match=words):
        draw(given)


def test_plot_without_matplotlib_raises_with_install_command(history, monkeypatch):
    # There is no public way to hide an installed package.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot.norms(history)


# The steps of a run that are logged: each, every tenth, the last, and those before and
# after a gap.
LOGGED = {
    "each step": np.arange(700),
    "few steps": np.arange(12),
    "every tenth step": np.arange(0, 3000, 10),
    "late steps": np.arange(1000, 1300),
    "two parts": np.r_[0:150, 450:600],
    "later every tenth step": np.r_[0:100, 100:1100:10],
}


def spiky(logged, spike):
    """Return a history of two leaves with a spike at one of the logged steps."""
    norms = np.where(logged == spike, 50.0, 1.0)
    return {
        **history_of(norms, 2.0, np.minimum(1, 2.0 / norms)),
        **{f"watch/norm/{leaf}": norms for leaf in "ab"},
        "clip/steps": logged + 1.0,
        "watch/steps": logged + 1.0,
    }


def spikes_in(ax):
    """Return the interval of the x axis in which a plot is largest."""
    if not ax.images:
        (line, *_) = ax.lines
        at = np.nanargmax(np.asarray(line.get_ydata(), float))
        return (line.get_xdata()[at],) * 2
    (image,) = ax.images
    left, right, *_ = image.get_extent()
    shown = image.get_array()
    width = (right - left) / shown.shape[1]
    (column,) = np.flatnonzero(np.ma.filled(shown, 0.0)[0] == 50.0)
    return left + column * width, left + (column + 1) * width


@pytest.mark.parametrize("kind", LOGGED)
@pytest.mark.parametrize("draw", [plot.norms, plot.rate, plot.heatmap])
def test_plot_draws_spike_at_its_step(draw, kind):
    logged = LOGGED[kind]
    options = {"window": 1} if draw is plot.rate else {}
    options["clip"] = "watch" if draw is plot.heatmap else "clip"
    for spike in logged[[5, len(logged) // 3, -1]]:
        ax = draw(spiky(logged, spike), **options)
        low, high = spikes_in(ax)
        assert low <= spike <= high
        # Of more than 200 steps a column of a heatmap shows several.
        distance = 10 if "tenth" in kind else 1
        width = max(distance, (np.ptp(logged) + distance) / 200)
        assert high - low <= (1.01 * width if draw is plot.heatmap else 0)
        assert ax.get_xlabel() == "step"
        plt.close("all")


def test_plot_of_recorded_run_counts_steps_from_zero():
    """The steps of metrics count updates, so the first step is 0."""
    skip = optclip.skip(optclip.clip_by_global_norm(2.0), max_norm=5.0)
    logged = recorded(skip, [1.0, 9.0, 9.0, 1.0, 1.0])
    late = {key: x[1:] for key, x in logged.items()}
    every = {key: x[::2] for key, x in logged.items()}
    # Steps that `skip` skipped count, although `clip` does not run and repeats its last
    # metrics.
    steps = {
        "skip": (range(5), range(1, 5), (0, 2, 4)),
        "clip": ((0, 3, 4), (1, 3, 4), (0, 4)),
    }
    for name, each in steps.items():
        for found, at in zip((logged, late, every), each, strict=True):
            assert list(plot.norms(found, clip=name).lines[0].get_xdata()) == list(at)


def test_plot_of_dropped_state_is_over_records():
    """The count stays 0, as does the count of `MultiSteps` for microbatches."""
    found = history_of([1.0, 3.0, 2.0], 2.0) | {"clip/steps": np.zeros(3)}
    ax = plot.norms(found)
    assert (ax.get_xlabel(), list(ax.lines[0].get_xdata())) == ("record", [0, 1, 2])
    assert plot.distribution(found).get_ylabel() == "records"


def test_heatmap_leaves_steps_that_were_not_logged_white():
    for kind in LOGGED:
        image = plot.heatmap(spiky(LOGGED[kind], 0)).images[0]
        white = np.ma.getmaskarray(image.get_array())[0]
        left, right, *_ = image.get_extent()
        missing = np.mean(white) * (right - left)
        np.testing.assert_allclose(missing, 300 * (kind == "two parts"), atol=6)
