"""Run the code blocks of the README and of each page, as the page prints them."""

import pathlib
import re

import jax
import numpy as np
import optax
import pytest

from optclip import per_example
from tests.integration.stacks.page import OTHER_LIBRARIES

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
PAGES = [
    path.name
    for path in sorted(DOCS.glob("*.md"))
    if "```python" in path.read_text() and path.name != "integrations.md"
]


@pytest.mark.parametrize("page", ["../README.md", "../AGENTS.md", *PAGES])
def test_page_code_prints_its_comments(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        if OTHER_LIBRARIES.search(code):
            continue
        exec(code, {})
        comments = re.findall(r"^# (.*)$", code, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == comments, code


def names_of(page, word):
    """Run the code block of a page that has `word`; return its names."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    names = {}
    exec(next(code for code in blocks if word in code), names)
    return names


def polar(x):
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def normalized(x, axes):
    return x / np.linalg.norm(x, axis=axes, keepdims=True)


def nor_muon(gradients):
    """Li et al. 2025, algorithm 1; all papers have outputs on rows."""
    m = v = 0.0
    for g in gradients:
        m = 0.95 * m + 0.05 * g
        v = 0.95 * v + 0.05 * np.mean(polar(m) ** 2, axis=-1, keepdims=True)
        scale = 0.2 * np.sqrt(np.prod(g.shape[-2:]))
        yield scale * normalized(polar(m) / (np.sqrt(v) + 1e-8), (-2, -1))


def with_nesterov(method):
    def run(gradients):
        m = 0.0
        for g in gradients:
            m = 0.95 * m + g
            yield method(g + 0.95 * m)

    return run


def muon_plus(x):
    rows, columns = x.shape[-2:]
    return np.sqrt(rows / columns) * normalized(normalized(polar(x), -1), -2)


def muon_eq(x):
    return 0.2 * np.sqrt(max(x.shape[-2:])) * polar(normalized(x, -1))


SUCCESSORS = {
    "NorMuon": nor_muon,
    "Muon+": with_nesterov(muon_plus),
    "MuonEq": with_nesterov(muon_eq),
}


@pytest.mark.parametrize("name", SUCCESSORS)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_successor_of_muon_follows_its_equations(name, shape):
    """Two stacked layers in a partition, against an exact SVD in float64."""
    parts = names_of("muon_attention_singular_values.md", "NorMuon")["methods"][name]
    tx = optax.partition(
        {"muon": optax.chain(*parts), "sgd": optax.sgd(1.0)},
        {"kernel": "muon", "bias": "sgd"},
    )
    draw = np.random.default_rng(0).standard_normal
    gradients = draw((30, 2, *shape)) * np.exp(draw(shape[1]))
    gradients = gradients.astype(np.float32)
    expected = SUCCESSORS[name](np.swapaxes(gradients, -1, -2).astype(float))
    tree = {"kernel": gradients[0], "bias": np.ones(3, np.float32)}
    state, update = tx.init(tree), jax.jit(tx.update)
    for g, wanted in zip(gradients, expected, strict=True):
        updates, state = update(tree | {"kernel": g}, state)
        kernel = np.swapaxes(updates["kernel"], -1, -2)
        np.testing.assert_allclose(kernel, wanted, rtol=0, atol=5e-5)
        np.testing.assert_array_equal(updates["bias"], -tree["bias"])


@pytest.mark.parametrize("c", [1e-3, 1.0, 30.0])
def test_slack_of_slaclip_keeps_sensitivity_of_gradient(c):
    """No gradient with its slack is longer than C; K = 50 as in jax_privacy's #343."""
    slack_of = names_of("private_training.md", "slack_of")["slack_of"]
    draw = np.random.default_rng(0)
    norms = np.r_[
        0, c, np.nextafter(c, 0), c * draw.uniform(0, 2, 2000), np.inf, np.nan
    ]
    grads = np.zeros((len(norms), 2), np.float32)
    grads[:, 0] = norms
    padding = draw.random(len(norms)) < 0.2

    @jax.jit
    @jax.vmap
    def clipped(grad, is_padding):
        return per_example.clipped_sum(grad[None], c, padding=is_padding[None])

    sums, info = clipped(grads, padding)
    slack, _ = slack_of(jax.tree.map(np.ravel, info), c)
    both = np.concatenate([sums, slack], axis=1).astype(float)
    assert np.max(np.linalg.norm(both, axis=1)) <= c
    assert not np.any(both[padding | ~np.isfinite(norms)])
    free = np.clip(1 - norms / c, 0, 1)
    expected = np.clip(50 * free[:, None] - np.arange(50), 0, 1) * c / 50**0.5
    counts = ~padding & np.isfinite(norms)
    np.testing.assert_allclose(
        slack[counts], expected[counts], rtol=1.3e-4, atol=c * 1e-5
    )
