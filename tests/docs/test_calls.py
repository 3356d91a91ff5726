"""Tests of calls on the pages: of other libraries and ours, and of `skip`."""

import ast
import functools
import pathlib
import re

import jax
import nbformat
import numpy as np
import optax
import pytest

import optclip
from optclip import functional as F
from optclip import recipes, thresholds
from tests.support import helpers, oracles

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = re.compile(
    r"^\| `((?:tf|keras|model|torch|optax)\..*?)` \| `(.*?)`.* \|$", re.MULTILINE
)
ROWS = dict(ROW.findall((ROOT / "docs" / "migrating.md").read_text()))
GRADS = [np.float32([[3.0, -0.5], [4.0, 0.2]]), np.float32([-2.0, 1.0])]
WIDE = helpers.as_float64(GRADS)
NORM, INF_NORM = oracles.tree_norm(WIDE), oracles.tree_norm(WIDE, np.inf)
NAMES = {
    "optax": optax, "optclip": optclip, "F": F, "grads": GRADS, "x": GRADS[0], "norm": 6.0,
    "tx": optax.sgd(1.0, momentum=0.9),
}  # fmt: skip


def by_norm(norm=NORM, eps=0.0):
    return [g * min(1.0, 1.0 / (norm + eps)) for g in WIDE]


def steps(clipped):
    return [-0.1 * g for g in clipped]


BY_VALUE = oracles.by_value(WIDE, -0.5, 0.5)
# The results of the calls elsewhere, by their documented formulas.
EXPECTED = {
    "tf.clip_by_value": np.clip(WIDE[0], -1, 2),
    "tf.clip_by_norm(x, 1.0)": oracles.by_leaf(WIDE[0], 1.0),
    "tf.clip_by_norm(x, 1.0, axes": oracles.by_first_axis(WIDE[0], 1.0),
    "tf.compat.v1": oracles.by_leaf(WIDE[0], 0.1, oracles.average_norm),
    "tf.linalg.global_norm": NORM,
    "tf.clip_by_global_norm(grads, 1.0)": (by_norm(), NORM),
    "tf.clip_by_global_norm(grads, 1.0, use_norm": (by_norm(6.0), 6.0),
    "keras.optimizers.SGD(0.1, clipvalue": steps(BY_VALUE),
    "keras.optimizers.SGD(0.1, clipnorm": steps(oracles.by_leaf(WIDE, 1.0)),
    "keras.optimizers.SGD(0.1, global_clipnorm": steps(by_norm()),
    "torch.nn.utils.clip_grad_norm_(params, 1.0)": (by_norm(eps=1e-6), NORM),
    "torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type": (
        by_norm(INF_NORM, 1e-6), INF_NORM,
    ),
    "torch.nn.utils.get_total_norm": NORM,
    "torch.nn.utils.clip_grads_with_norm_": (by_norm(6.0, 1e-6), 6.0),
    "torch.nn.utils.clip_grad_value_": BY_VALUE,
    "optax.clip(": BY_VALUE,
    "optax.clip_by_global_norm": by_norm(),
    "optax.clip_by_block_rms": oracles.by_leaf(WIDE, 0.1, oracles.rms),
    "optax.tree.norm": NORM,
}  # fmt: skip


def result_of(call):
    """Evaluate a call of the table; apply the transformation that it may return."""

    def run():
        result = eval(call, NAMES)
        if isinstance(result, optax.GradientTransformation):
            result, _ = result.update(GRADS, result.init(GRADS), GRADS)
        return result

    return helpers.quick_jit(run)()


@pytest.mark.parametrize("start", EXPECTED)
def test_call_matches_formula_of_the_other_library(start):
    """TensorFlow, Keras and PyTorch are run by tests/integration/parity."""
    (elsewhere,) = (call for call in ROWS if call.startswith(start))
    calls = [ROWS[elsewhere], *([elsewhere] if start.startswith("optax") else [])]
    for call in calls:
        result, expected = map(jax.tree.leaves, (result_of(call), EXPECTED[start]))
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)


def sum_of_examples(call):
    call = call.replace("1.1, key", "0.0, 0").replace("=64", "=2")  # without noise
    result = eval(call, NAMES)
    if isinstance(result, optax.GradientTransformation):
        return helpers.quick_jit(result.update)(GRADS, result.init(GRADS))[0]
    return result[0]


def skipped_steps(call):
    large = functools.partial(optax.skip_large_updates, max_squared_norm=100.0)
    tx = eval(call, NAMES | {"large": large})
    tx = getattr(tx, "gradient_transformation", lambda: tx)()
    state, steps, update = tx.init(np.zeros(2)), [], helpers.quick_jit(tx.update)
    for size in (1.0, 50.0, 2.0, np.nan, 3.0, 4.0):
        updates, state = update(np.float32([size, 1.0]), state, np.zeros(2))
        steps.append(updates)
    return steps


@pytest.mark.parametrize(
    ("start", "results_of"),
    [
        ("optax.per_example_layer_norm_clip", sum_of_examples),
        ("optax.contrib.differentially_private_aggregate", sum_of_examples),
        ("optax.MultiSteps(tx, 4, should_skip_update_fn=large", skipped_steps),
    ],
)
def test_row_of_optax_matches_optax(start, results_of):
    (row,) = (row for row in ROWS.items() if row[0].startswith(start))
    theirs, ours = (jax.tree.leaves(results_of(call)) for call in row)
    assert any(map(np.any, theirs))
    # By default optclip rounds sums of examples towards zero.
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


def test_readme_calls_are_rows_of_the_comparison():
    calls = dict(ROW.findall((ROOT / "README.md").read_text()))
    assert len(calls) == 4
    assert calls.items() <= ROWS.items()
    # Other folders test `agc`, `skip`, the sum over examples and `model.compile`.
    assert len(ROWS) == len(EXPECTED) + 9


# The calls of `skip` on pages, in notebooks and examples follow a lasting change.

LIMITS, POLICY = ["max_norm", "max_loss"], ["max_consecutive", "learn_skipped"]
BEFORE, AFTER = 1500, 6000


def codes():
    """Yield the code of the README, pages, notebooks and examples."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield from re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        yield from (cell.source for cell in cells if cell.cell_type == "code")
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield path.read_text()


def calls_of_skip():
    """Return the options of each different call of `skip`, as source text."""
    found = set()
    for node in (node for code in codes() for node in ast.walk(ast.parse(code))):
        function = getattr(node, "func", None)
        if "skip" in (getattr(function, "id", ""), getattr(function, "attr", "")):
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            options = {k: v.replace("optclip.", "") for k, v in options.items()}
            found.add(tuple((k, options[k]) for k in LIMITS + POLICY if k in options))
    return sorted(found)


LEARNED = [
    call for call in calls_of_skip() if re.search("[a-z]", "".join(v for _, v in call))
]


def test_calls_of_skip_leave_policy_to_its_defaults():
    assert len(LEARNED) >= 3
    assert not [call for call in calls_of_skip() if dict(call).keys() & POLICY]


@pytest.mark.parametrize("call", [*LEARNED, "olmo_skip"], ids=str)
def test_skip_after_lasting_change_skips_few_steps(call):
    """At most 300 of 6,000, whether norms and losses rise little or much."""
    if call == "olmo_skip":
        tx = recipes.olmo_skip(optax.identity())
    else:
        names = {"optclip": optclip, "thresholds": thresholds}
        options = {key: eval(text, names) for key, text in call}
        tx = optclip.skip(optax.identity(), **options)
    random = np.random.default_rng(0)
    changes = np.repeat([[1.0, 1.5], [1.0, 20.0], [1.0, 1000.0]], 2, axis=0)
    levels = np.repeat(changes, [BEFORE, AFTER], axis=1)
    noise = np.exp([[0.02], [0.3]] * 3 * random.normal(size=levels.shape))

    def step(state, size):
        update, state = tx.update(size, state, value=size)
        return state, update == 0

    def skipped(sizes):
        return jax.lax.scan(step, tx.init(sizes[0]), sizes)[1]

    skips = helpers.quick_jit(jax.vmap(skipped))(np.float32(levels * noise))
    assert np.max(np.sum(skips[:, BEFORE:], axis=1)) <= 300
    assert np.any(skips[2:, BEFORE])
