"""Each test draws from a generator of its own."""

import ast
import pathlib
import re

TESTS = pathlib.Path(__file__).parents[1]
# Objects whose next result depends on the earlier ones.
STATEFUL = re.compile(
    r"((np\.)?random\.)?(default_rng|RandomState|Random)|(itertools\.)?(count|cycle)|iter"
)


def kept_at_import(node, is_kept=True):
    """Yield the lines on which an import builds a generator and does not use it up.

    `default_rng(0).normal()` and `drawn(default_rng(0))` use it up.
    """
    if isinstance(node, ast.Call) and is_kept:
        yield from [node.lineno] * bool(STATEFUL.fullmatch(ast.unparse(node.func)))
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        # The body runs in a test; the defaults are shared by all calls.
        children = [node.args, *getattr(node, "decorator_list", [])]
    else:
        children = ast.iter_child_nodes(node)
    is_used_up = isinstance(node, ast.Attribute | ast.Call)
    for child in children:
        yield from kept_at_import(child, not is_used_up)


def test_scan_of_shared_and_used_up_generators_yields_lines_of_shared():
    shared = "RNG = default_rng(0)\nclass A: ids = [count()]\ndef f(rng=Random(0)): ..."
    used_up = "X = default_rng(0).normal()\nY = f(default_rng(0))\ndef f(): cycle([])"
    assert list(kept_at_import(ast.parse(shared))) == [1, 2, 3]
    assert not [*kept_at_import(ast.parse(used_up))]


def test_modules_after_import_keep_no_generator_that_tests_share():
    """Data from it would depend on the tests that a worker ran before."""
    paths = sorted(TESTS.rglob("*.py"))
    assert len(paths) > 100
    assert not [
        f"{path.relative_to(TESTS)}:{line}"
        for path in paths
        for line in kept_at_import(ast.parse(path.read_text()))
    ]
