"""Pictures show what was recorded, from any form of a history."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import pytest

import optclip
from optclip import plot
from tests.support import helpers

mpl.use("Agg")
import matplotlib.pyplot as plt

NORMS = [1.0, 3.0, float("nan"), 50.0, 2.0]


@pytest.fixture(autouse=True)
def no_figure_is_left():
    yield
    plt.close("all")


def recorded(tx, norms=NORMS):
    """The metrics of a run over gradients of these norms."""
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    update, state, history = helpers.quick_jit(tx.update), tx.init(params), []
    for norm in norms:
        grads = {"a": jnp.array([norm * 0.6]), "b": jnp.array([norm * 0.8])}
        _, state = update(grads, state, params)
        history.append(optclip.metrics(state))
    return history


@pytest.fixture(scope="module")
def history():
    return recorded(optclip.clip_by_global_norm(2.0))


def lines(ax):
    return {line.get_label(): np.asarray(line.get_ydata(), float) for line in ax.lines}


def test_norms_are_drawn_with_their_threshold(history):
    ax = plot.norms(history)
    found = lines(ax)
    np.testing.assert_allclose(found["before"], [1, 3, np.nan, 50, 2], rtol=1e-6)
    np.testing.assert_allclose(found["after"], [1, 2, np.nan, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(found["threshold"], 2.0)
    bad = next(line for line in ax.lines if line.get_label() == "not finite")
    assert list(bad.get_xdata()) == [2]
    # From 1 to 50.
    assert ax.get_yscale() == "log"
    # One clip needs no name.
    assert (ax.get_xlabel(), ax.get_title()) == ("step", "")
    assert (
        plot.norms(recorded(optclip.clip_by_global_norm(2.0), [1.0, 3.0])).get_yscale()
        == "linear"
    )


@pytest.mark.parametrize("draw", [plot.norms, plot.rate, lambda h: plot.runs({"a": h})])
def test_one_step_is_seen(draw):
    """A line through one point is none."""
    lines = draw(recorded(optclip.clip_by_global_norm(1.0), [3.0])[0]).lines
    assert lines
    assert all(line.get_markevery() == [0] for line in lines)
    # A threshold is no dot, which would hide what was clipped to it.
    wanted = {"threshold": "_"}
    assert all(x.get_marker() == wanted.get(x.get_label(), "o") for x in lines)


def test_a_step_between_two_that_are_not_finite_is_seen():
    norm = [1.0, 2.0, np.nan, 3.0, np.nan, 4.0, 5.0, np.nan, 6.0]
    ones = [1.0] * len(norm)
    history = {"clip/norm": norm, "clip/threshold": ones, "clip/coefficient": ones}
    before, _, threshold, _ = plot.norms(history).lines
    assert before.get_markevery() == [3, 8]
    assert threshold.get_marker() == "None"


def test_a_threshold_that_is_infinite_is_not_drawn():
    ax = plot.norms(recorded(optclip.clip_by_global_norm(jnp.inf)))
    assert "threshold" not in lines(ax)


def test_of_leaves_what_is_left_is_not_known():
    """Norm is the largest and coefficient the smallest: their product is no norm."""
    ax = plot.norms(recorded(optclip.clip_by_norm(2.0)))
    assert set(lines(ax)) == {"before", "threshold", "not finite"}


def test_every_form_of_a_history(history, tmp_path):
    stacked = {key: np.stack([h[key] for h in history]) for key in history[0]}
    plot.save(history, tmp_path / "run.jsonl")
    rows = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(rows[1])["clip/norm"] == 3.0
    # NaN and inf are no JSON.
    assert json.loads(rows[2], parse_constant=pytest.fail)["clip/norm"] == "nan"
    expected = lines(plot.norms(history))
    for form in (
        stacked,
        tmp_path / "run.jsonl",
        str(tmp_path / "run.jsonl"),
        tuple(history),
    ):
        for key, values in lines(plot.norms(form)).items():
            np.testing.assert_array_equal(values, expected[key])


def test_as_scan_stacks_it():
    tx = optclip.clip_by_global_norm(2.0)

    def step(state, size):
        _, state = tx.update(size, state)
        return state, optclip.metrics(state)

    scan = helpers.quick_jit(lambda x: jax.lax.scan(step, tx.init(x[0]), x)[1])
    stacked = scan(jnp.arange(5.0))
    np.testing.assert_allclose(lines(plot.norms(stacked))["after"], [0, 1, 2, 2, 2])


@pytest.mark.parametrize("draw", [plot.norms, plot.rate, plot.heatmap])
def test_what_was_logged_beside_the_metrics(draw):
    """Of every tenth step, with a loss, a time, and another number now and then."""
    tx = optclip.clip_by_group_norm(1.0, {"a": "first", "b": "second"})
    history = [
        {**h, "step": 10 * i, "loss": "?", "time": "now"} | ({} if i else {"held": 1})
        for i, h in enumerate(recorded(tx))
    ]
    ax = draw(history, **({} if draw is plot.heatmap else {"part": "first"}))
    if draw is plot.heatmap:
        assert tuple(ax.images[0].get_extent()[:2]) == (-5, 45)
    else:
        assert list(ax.lines[0].get_xdata()) == [0, 10, 20, 30, 40]


def test_axes_that_are_given(history):
    _, (one, other) = plt.subplots(1, 2)
    assert plot.norms(history, ax=one) is one
    assert plot.rate(history, ax=other) is other


def test_the_rate_is_drawn_over_a_window():
    ax = plot.rate(
        recorded(optclip.clip_by_global_norm(2.0), [1, 3, 3, 1, 1]), window=2
    )
    np.testing.assert_allclose(lines(ax)["so far"], [0, 1 / 2, 2 / 3, 1 / 2, 2 / 5])
    np.testing.assert_allclose(lines(ax)["last 2 steps"], [0, 1 / 2, 1, 1 / 2, 0])
    assert list(lines(plot.rate(recorded(optclip.clip_by_global_norm(2.0))))) == [
        "so far"
    ]


def test_the_distribution_has_each_norm_once(history):
    ax = plot.distribution(history)
    assert sum(patch.get_height() for patch in ax.patches) == 4
    assert ax.get_legend_handles_labels()[1] == ["threshold 2: above 25% of the norms"]
    one = plot.distribution(recorded(optclip.clip_by_global_norm(jnp.inf), [3.0]))
    assert not one.get_legend_handles_labels()[1]
    with pytest.raises(ValueError, match="a norm that is finite and above 0"):
        plot.distribution(recorded(optclip.clip_by_global_norm(2.0), [0.0]))


def test_of_leaves_one_extreme_says_nothing_of_the_other():
    ax = plot.distribution(recorded(optclip.clip_by_norm(2.0)))
    assert ax.get_legend_handles_labels()[1] == ["smallest threshold 2"]
    assert ax.get_xlabel() == "largest norm of all"


def test_the_heatmap_has_a_row_a_leaf():
    tx = optclip.clip_by_norm(jnp.inf, record="leaves", name="watch")
    ax = plot.heatmap(
        recorded(optax.chain(tx, optclip.clip_by_global_norm(1.0))), clip="watch"
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a"]
    # The only one that has leaves need not be named.
    chained = recorded(optax.chain(tx, optclip.clip_by_global_norm(1.0)))
    assert plot.heatmap(chained).get_title() == "watch"
    shown = ax.images[0].get_array()
    expected = np.array([[0.8, 2.4, 1, 40, 1.6], [0.6, 1.8, 1, 30, 1.2]])
    assert list(np.ma.getmaskarray(shown)[0]) == [False, False, True, False, False]
    np.testing.assert_allclose(
        shown[:, [0, 1, 3, 4]], expected[:, [0, 1, 3, 4]], rtol=1e-5
    )


def test_a_heatmap_of_more_than_can_be_seen():
    history = {f"clip/norm/{i}": np.full(1000, i + 1.0) for i in range(70)}
    history["clip/norm/69"] = np.full(1000, np.nan)
    ax = plot.heatmap(history)
    assert ax.images[0].get_array().shape == (60, 200)
    assert ax.get_title() == "clip (the largest 60 of 70)"
    assert ax.get_yticklabels()[0].get_text() == "68"


def test_runs_are_drawn_side_by_side(history):
    ax = plot.runs(
        {"clipped": history, "loose": recorded(optclip.clip_by_global_norm(9.0))},
        window=2,
    )
    found = lines(ax)
    assert list(found) == ["clipped (40% clipped)", "loose (20% clipped)"]
    np.testing.assert_allclose(
        found["loose (20% clipped)"], [1, 2, 3, 50, 26], rtol=1e-6
    )


@pytest.mark.parametrize("draw", [plot.norms, plot.rate, plot.distribution])
def test_one_clip_of_several_one_group_of_several(draw):
    labels = {"a": "first", "b": "second"}
    tx = optax.chain(
        optclip.clip_by_group_norm(1.0, labels),
        optclip.clip_by_global_norm(1.0, name="all"),
    )
    history = recorded(tx)
    assert draw(history, clip="all").get_title() == "all"
    assert draw(history, clip="clip", part="second").get_title() == "clip/second"
    with pytest.raises(
        ValueError, match=r"`clip` must be one of \['clip', 'all'\], got None"
    ):
        draw(history)
    with pytest.raises(ValueError, match=r"`part` must be one of \['first', 'seco"):
        draw(history, clip="clip", part="third")
    with pytest.raises(ValueError, match="must have groups or leaves, got none"):
        draw(history, clip="all", part="third")


BAD = {
    "a number": (3.0, TypeError, "`history` must be a list of dicts"),
    "numbers": ([3.0], TypeError, "`history` must be a list of dicts"),
    "nothing": ([], ValueError, "must have a step"),
    "no arrays": ({}, ValueError, "must have a step"),
    "other keys": ([{"clip/norm": 1.0}, {"loss": 1.0}], ValueError, r"same keys in each step, got \['clip/norm'\].* 0 and 1"),
    "no names": ({3: [1.0]}, ValueError, "must have norms of a clip"),
    "no clip": ({"loss": [1.0]}, ValueError, "must have norms of a clip"),
    "no threshold": ({"clip/norm": [1.0], "clip/coefficient": [1.0]}, ValueError, "must have the norm, threshold and .* got its norm and coefficient alone"),
    "a norm an axis": ({"clip/norm": np.ones((2, 3))}, ValueError, r"an array of shape \(2, 3\)"),
    "norms alone": ({"clip/norm": [1.0]}, ValueError, "must have the norm, threshold and coefficient of 'clip', got its norm alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_history(name):
    given, error, match = BAD[name]
    with pytest.raises(error, match=match):
        plot.norms(given)


def test_a_file_that_broke_off(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text('{"clip/norm": 1.0}\n{"clip/no')
    with pytest.raises(
        ValueError, match=r"Line 2 of .*run.jsonl must be a JSON object.*clip/no"
    ):
        plot.norms(file)


def test_what_makes_no_picture(history):
    with pytest.raises(ValueError, match="got one norm a step"):
        plot.heatmap(history)
    with pytest.raises(ValueError, match="`window` must be an int from 1 to .*got 0"):
        plot.rate(history, window=0)
    with pytest.raises(TypeError, match="must be a dict from what to call a run"):
        plot.runs([history])
    with pytest.raises(ValueError, match="`histories` must have at least one run"):
        plot.runs({})


def test_matplotlib_is_imported_by_the_call():
    code = "import sys, optclip; assert optclip.plot; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_error_says_how_to_get_it(history, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot.norms(history)


def test_zeros_are_not_clipped_and_the_largest_float_is_no_threshold():
    """As `metrics` counts, and as a rule stands for inf where a norm is NaN."""
    history = {
        "clip/norm": [0.0, np.nan, 4.0],
        "clip/threshold": [1.0, np.finfo(np.float32).max, 1.0],
        "clip/coefficient": [0.0, 0.0, 0.25],
    }
    rate = optclip.plot.rate(history).lines[0].get_ydata()
    np.testing.assert_allclose(rate, [0, 0, 1 / 3])
    assert optclip.plot.norms(history).get_ylim()[1] < 1e3


def test_records_of_cotangents_beside_those_of_a_clip_are_left_out():
    tx = optclip.clip_by_global_norm(1.0)
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    record = optclip.typing.CotangentRecord(*jnp.ones(6))
    found = jax.device_get(optclip.metrics({"tx": state, "cell": record}))
    assert "cell/largest_norm" in found
    ax = plot.norms([found, found])
    assert ax.get_lines()
    plt.close(ax.figure)
