"""The calls of `skip` on pages, in notebooks and examples follow a lasting change."""

import ast
import pathlib
import re

import jax
import nbformat
import numpy as np
import optax
import pytest

import optclip
from optclip import recipes, thresholds
from tests.support import helpers

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def calls():
    """Return the options of each different call of `skip`, as source text."""
    found = set()
    for node in (node for code in codes() for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Call) and re.search(r"\bskip$", ast.unparse(node.func)):
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            options = {k: v.replace("optclip.", "") for k, v in options.items()}
            found.add(tuple((k, options[k]) for k in LIMITS + POLICY if k in options))
    return sorted(found)


LEARNED = [call for call in calls() if re.search("[a-z]", "".join(v for _, v in call))]


def test_calls_of_skip_leave_policy_to_its_defaults():
    assert len(LEARNED) >= 3
    assert not [call for call in calls() if dict(call).keys() & POLICY]


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
