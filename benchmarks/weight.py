"""Question `weight`: equations, lines and imports of the package, and an eager call.

All but seconds are the same in each run, and are tests as well.
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
from tools.imports import ROOT, longest_chain

# What is traced for one leaf, and the most equations that a test allows.
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
    """How many equations one leaf of (64, 64) float32 is, those inside others too."""
    make, _ = EQUATIONS[name]
    made, x = make(), jnp.ones((64, 64))
    if not isinstance(made, optax.GradientTransformation):
        return _count(jax.make_jaxpr(made)(x).jaxpr)
    return _count(jax.make_jaxpr(made.update)(x, made.init(x), x).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(1 + sum(map(_count, _inside(eqn))) for eqn in jaxpr.eqns)


def _inside(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def lines() -> int:
    """Lines of code in the package, without docstrings, comments and blank ones."""
    return sum(_lines_in(path) for path in ROOT.rglob("*.py"))


def _lines_in(path: pathlib.Path) -> int:
    none = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
        tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
    )  # fmt: skip
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in none]
    found = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or isinstance(node, ast.If):
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            found -= set(range(first.lineno, first.end_lineno + 1))
    return len(found)


def import_seconds(runs: int) -> float:
    """What it takes after jax and optax, at least; the first run writes bytecode."""
    code = (
        "import time, jax, optax; start = time.perf_counter(); import optclip;"
        " print(time.perf_counter() - start)"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command, env=env)) for _ in range(runs))


def eager_ratio(calls: int) -> float:
    """An eager clip of six leaves over optax's, call by call."""
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
    yield {"what": "longest chain of imports", "measured": len(longest_chain())}
    runs, calls = (1, 2) if tiny else (5, 100)
    yield {"what": "seconds to import", "measured": import_seconds(runs)}
    yield {"what": "eager call over optax's", "measured": eager_ratio(calls)}
