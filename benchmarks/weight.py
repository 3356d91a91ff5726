"""Benchmark `weight`: equations, lines of code, imports, and an eager call.

All figures except times are deterministic; tests limit them.
"""

import ast
import os
import pathlib
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks.timing import Contender, Row, race
from optclip import functional, recipes
from tools.imports import ROOT, floors

# The function or transformation to trace, and the most equations that a test allows.
EQUATIONS: dict[str, tuple[Callable[[], Any], int]] = {
    "functional.global_norm": (lambda: functional.global_norm, 25),
    "functional.clip_by_global_norm": (
        lambda: lambda x: functional.clip_by_global_norm(x, 1.0),
        50,
    ),
    "clip_by_global_norm": (lambda: optclip.clip_by_global_norm(1.0), 85),
    "clip_by_norm(axis=0)": (lambda: optclip.clip_by_norm(1.0, axis=0), 100),
    "recipes.agc": (lambda: recipes.agc(0.01), 150),
    "recipes.zclip": (recipes.zclip, 180),
}


def equations(name: str) -> int:
    """Count equations, also nested ones, for one platform and a leaf of (64, 64)."""
    build, _ = EQUATIONS[name]
    built, x = build(), jnp.ones((64, 64))
    if not isinstance(built, optax.GradientTransformation):
        return _count(jax.make_jaxpr(built)(x).jaxpr)
    return _count(jax.make_jaxpr(built.update)(x, built.init(x), x).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = [_count(each) for each in _inside(eqn)]
        # A program for one platform has one of the branches for several.
        is_one = eqn.params.get("branches_platforms") is not None
        total += 1 + (max(inner) if is_one else sum(inner))
    return total


def _inside(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def lines() -> int:
    """Count lines of code, without docstrings, comments and blank lines."""
    return sum(_lines_in(path) for path in ROOT.rglob("*.py"))


def _lines_in(path: pathlib.Path) -> int:
    no_code = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
        tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
    )  # fmt: skip
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in no_code]
    numbers = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or isinstance(node, ast.If):
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            numbers -= set(range(first.lineno, first.end_lineno + 1))
    return len(numbers)


def import_seconds(runs: int) -> float:
    """Return the least time to import optclip after jax and optax.

    The first of several runs writes bytecode.
    """
    code = (
        "import time, jax, optax; start = time.perf_counter(); import optclip;"
        " print(time.perf_counter() - start)"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command, env=env)) for _ in range(runs))


def eager_ratio(calls: int) -> float:
    """Return the time of eager global-norm clipping of six leaves over optax's."""
    tree = [jnp.ones((64, 64))] * 6

    def contender(tx: Any) -> Contender:
        state = tx.init(tree)
        return Contender(lambda: jax.block_until_ready(tx.update(tree, state)))

    modules = {"optclip": optclip, "optax": optax}
    clips = {name: contender(m.clip_by_global_norm(1.0)) for name, m in modules.items()}
    return race(clips, calls, against="optax")[0]["over optax"]


def rows(tiny: bool) -> Iterator[Row]:
    for name in EQUATIONS:
        yield {"what": f"equations of {name}", "measured": equations(name)}
    yield {"what": "lines of code", "measured": lines()}
    yield {"what": "floors of imports", "measured": len(floors())}
    runs, calls = (1, 2) if tiny else (5, 100)
    yield {"what": "seconds to import", "measured": import_seconds(runs)}
    yield {"what": "eager call over optax's", "measured": eager_ratio(calls)}
