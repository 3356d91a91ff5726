"""Every cell of the table of `nonfinite=`, in both layers, eager and compiled."""

import functools

import numpy as np
import pytest
from jax.experimental import checkify

import optclip
from optclip import functional as F
from tests.support import helpers
from tests.support import nonfinite_cells as nf
from tools import nonfinite_page

LAYERS = ("functional", "transform")


def is_pure(cell):
    """Whether a pure clip has such a mask: those of parts of leaves have `mask` alone."""
    if cell.scope in ("leaf", "axes", "element"):
        return cell.input.outside_norm == cell.input.outside_clip
    return True


def in_layers(cells):
    """Each cell in each layer that has it."""
    cases = [
        (layer, cell)
        for layer in LAYERS
        for cell in cells
        if layer == "transform" or is_pure(cell)
    ]
    ids = [f"{layer}-{cell.id}" for layer, cell in cases]
    return pytest.mark.parametrize("cell", cases, ids=ids)


cells = in_layers(nf.CELLS)
raised = in_layers([cell for cell in nf.CELLS if cell.policy == "raise"])

OVER = {
    "tree": "tree",
    "leaf": "leaf",
    "axes": optclip.axes(-1),
    "groups": optclip.groups(nf.GROUPS),
    "element": "element",
}
PURE = {
    "tree": lambda t, **kw: F.clip_by_global_norm(t, nf.LIMIT, **kw)[0],
    "leaf": lambda t, **kw: F.clip_by_norm(t, nf.LIMIT, **kw),
    "axes": lambda t, **kw: F.clip_by_norm(t, nf.LIMIT, axis=-1, **kw),
    "groups": lambda t, **kw: F.clip_by_group_norm(t, nf.LIMIT, nf.GROUPS, **kw)[0],
    "element": lambda t, ord, **kw: F.clip_by_value(
        t, lower=-nf.LIMIT, upper=nf.LIMIT, **kw
    ),
}


def clip_of(layer, cell):
    """From a tree to the clipped one and the metrics (none of the pure layer)."""
    kwargs = {"nonfinite": cell.policy, **nf.masks(cell.input)}
    if layer == "functional":
        clip = functools.partial(PURE[cell.scope], ord=cell.ord, **kwargs)
        return helpers.strictly(lambda tree: (clip(tree), {}))
    tx = optclip.clip_by(nf.LIMIT, norm=cell.ord, over=OVER[cell.scope], **kwargs)

    def transform(tree):
        found, state = tx.update(tree, tx.init(tree))
        return found, optclip.metrics(state)

    return helpers.strictly(transform)


@functools.cache
def compiled(layer, scope, masked, large):
    """One program for all policies, and all inputs that differ in values only."""
    given = next(name for name, case in nf.INPUTS.items() if masks_of(case) == masked)

    def clips(tree):
        cells = [nf.Cell(policy, given, scope, large) for policy in nf.POLICIES]
        return {cell.policy: clip_of(layer, cell)(tree) for cell in cells}

    return helpers.quick_jit(checkify.checkify(clips))


def masks_of(case):
    return case.outside_norm, case.outside_clip


@functools.cache
def all_policies(layer, given, scope, large):
    """What the program makes of an input: an error, and the outcome by policy."""
    case = nf.INPUTS.get(given)
    masked = masks_of(case) if case else (False, False)
    return compiled(layer, scope, masked, large)(nf.gradients(case, large=large))


def assert_outcome(found, cell):
    for name, leaf in found.items():
        leaf = leaf.todense() if name == "rows" else leaf
        np.testing.assert_allclose(leaf, nf.array(cell, name), rtol=1e-6, err_msg=name)


def assert_cell(layer, cell, found, metrics):
    """What comes out, and whether the metrics count the step as non-finite."""
    tree = nf.gradients(cell.input, large=cell.large)
    helpers.assert_same_types(found, tree)
    assert helpers.differs(found, tree)
    assert_outcome(found, cell)
    if layer == "transform":
        counted = [int(n) for key, n in metrics.items() if "nonfinite" in key]
        assert max(counted) == nf.measured(cell)


@cells
def test_each_cell_does_what_the_table_says(cell):
    layer, cell = cell
    outcomes = all_policies(layer, cell.given, cell.scope, cell.large)[1]
    assert_cell(layer, cell, *outcomes[cell.policy])


@pytest.mark.covering(
    layer=LAYERS,
    policy=nf.POLICIES,
    given=tuple(nf.INPUTS),
    scope=nf.SCOPES,
    large=(False, True),
    where=lambda layer, **cell: layer == "transform" or is_pure(nf.Cell(**cell)),
)
def test_each_cell_does_so_op_by_op(layer, policy, given, scope, large):
    cell = nf.Cell(policy, given, scope, large)
    tree = nf.gradients(cell.input, large=large)
    assert_cell(layer, cell, *clip_of(layer, cell)(tree))


@raised
def test_raise_names_the_leaf(cell):
    """Under checkify an error; what comes out beside it is that of propagate."""
    layer, cell = cell
    message = all_policies(layer, cell.given, cell.scope, cell.large)[0].get()
    assert (message is not None) == nf.is_error(cell)
    if message is not None:
        named = [cell.input.leaf] if cell.input.leaf else nf.GROUPS
        said = [f"in the leaf '{leaf}' (nonfinite='raise')" for leaf in named]
        assert any(text in message for text in said)


@pytest.mark.parametrize("scope", nf.SCOPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_raise_is_silent_about_finite_updates(scope, layer):
    """The padding of a BCOO leaf holds NaN, and is no update."""
    error, found = all_policies(layer, None, scope, large=False)
    assert error.get() is None
    assert helpers.differs(found["raise"][0], nf.gradients(None, large=False))


@pytest.mark.parametrize("scope", nf.SCOPES)
def test_no_two_policies_do_the_same_everywhere(scope):
    """What no policy could fail would be no table."""
    masked = {name for name, case in nf.INPUTS.items() if any(masks_of(case))}
    for given in set(nf.INPUTS) - masked:
        outcomes = {nf.words(nf.Cell(p, given, scope)) for p in nf.POLICIES}
        assert len(outcomes) >= 3
    assert all(nf.words(c) for c in nf.CELLS if not c.large)


def test_the_page_holds_the_table():
    """If not: python -m tools.nonfinite_page."""
    page = nonfinite_page.PAGE.read_text()
    assert nonfinite_page.table() in page
    assert page == nonfinite_page.written(page)
