"""What a clip weighs before it runs: `python -m benchmarks weight`, a quarter of an hour.

Equations, lines and imports are the same in each run, and are tests as well. Compile
times are of processes of their own, ours and optax's by turns; ratios are medians.
"""

import ast
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks import machine, trees
from benchmarks.steps import made
from optclip import functional, recipes

ROOT = pathlib.Path(optclip.__file__).parent
OUT = pathlib.Path(__file__).parent / "results/weight.json"
ROUNDS = 3

# Goals are those of the first light version.
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

CLIPS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "global": lambda: optclip.clip_by_global_norm(1.0),
    "leaf": lambda: optclip.clip_by_norm(1.0),
    "agc": lambda: recipes.agc(0.01),
    "adagc": recipes.adagc,
    "unclipped": optax.identity,
    "optax global": lambda: optax.clip_by_global_norm(1.0),
    "optax block rms": lambda: optax.clip_by_block_rms(1.0),
    "optax agc": lambda: optax.adaptive_grad_clip(0.01),
}
NEAREST = {
    "global": "optax global",
    "leaf": "optax block rms",
    "agc": "optax agc",
    "adagc": "optax block rms",
}
# The shapes, whether AdamW follows, the clip, and the most it may take of optax's time.
MOST = {"global": 1.0, "leaf": 1.5, "agc": 2.0, "adagc": 2.0}
COMPILED = [
    *[
        (shapes, True, clip, MOST[clip])
        for shapes in ("gpt2", "llama")
        for clip in MOST
    ],
    *[(str(n), False, "global", 1.2) for n in (100, 500, 1000)],
]
# The shapes, their dtype, the optimizer, the clip, what it is beside, and its goal. The
# gradients are made in the step; the Llama is a sixteenth as wide.
STEPPED = [
    ("gpt2", "float32", "adamw", "global", "unclipped", 1.06),
    ("gpt2", "bfloat16", "adamw", "global", "unclipped", 1.06),
    ("narrow llama", "float32", "none", "agc", "optax agc", 1.0),
    ("narrow llama", "bfloat16", "none", "agc", "optax agc", 1.0),
]
OPTIMIZERS = {"adamw": lambda: optax.adamw(1e-3), "none": optax.identity}
STEPS = 21


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


def rooms() -> dict[str, set[str]]:
    """Each folder of the package, or file at its root, and those that it imports."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).with_suffix("").parts[0]
        imported = found.setdefault(here, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [
                    f"{node.module}.{alias.name}".split(".") for alias in node.names
                ]
                imported |= {name[1] for name in names if name[0] == "optclip"}
    # The public face imports all.
    found.pop("__init__")
    return {here: (below & found.keys()) - {here} for here, below in found.items()}


def longest_chain() -> list[str]:
    """The longest chain of imports between rooms, from the top down."""
    below = rooms()

    @functools.cache
    def under(room: str) -> tuple[str, ...]:
        return (room, *max(map(under, below[room]), key=len, default=()))

    return list(max(map(under, below), key=len))


def import_seconds() -> float:
    """What `import optclip` takes after jax and optax, the least of some runs.

    With bytecode written by the first of them, as an installation writes it.
    """
    code = (
        "import time, jax, optax; start = time.perf_counter(); import optclip;"
        " print(time.perf_counter() - start)"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    runs = [subprocess.check_output(command, env=env) for _ in range(5)]
    return min(map(float, runs))


def eager_ratio() -> float:
    """An eager clip of six leaves over optax's, call by call."""
    tree = [jnp.ones((64, 64))] * 6
    calls = []
    for make in (CLIPS["global"], CLIPS["optax global"]):
        tx = make()
        calls.append(functools.partial(tx.update, tree, tx.init(tree)))
    samples = []
    for _ in range(100):
        took = []
        for call in calls:
            start = time.perf_counter()
            jax.block_until_ready(call())
            took.append(time.perf_counter() - start)
        samples.append(took[0] / took[1])
    return statistics.median(samples)


def compile_ratio(shapes: str, chained: bool, clip: str) -> float:
    """Seconds to trace, lower and compile over those of optax's nearest."""
    samples = []
    for _ in range(ROUNDS):
        ours, theirs = (
            _seconds_of_its_own(shapes, chained, name) for name in (clip, NEAREST[clip])
        )
        samples.append(ours / theirs)
    return statistics.median(samples)


def _seconds_of_its_own(shapes: str, chained: bool, clip: str) -> float:
    command = [sys.executable, "-m", "benchmarks.weight", shapes, str(chained), clip]
    return float(subprocess.check_output(command, stderr=subprocess.DEVNULL))


def seconds_to_compile(shapes: str, chained: bool, clip: str) -> float:
    """The same, in this process, which is to be fresh."""
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in _shapes(shapes)]
    tx = CLIPS[clip]()
    tx = optax.chain(tx, optax.adamw(1e-3)) if chained else tx
    state = jax.eval_shape(tx.init, tree)
    # What JAX itself does but once.
    jax.jit(lambda x: x + 1).lower(tree[0]).compile()
    start = time.perf_counter()
    jax.jit(tx.update).lower(tree, state, tree).compile()
    return time.perf_counter() - start


def step_ratio(shapes: str, dtype: str, optimizer: str, clip: str, other: str) -> float:
    """Seconds of a step over those of another, call by call."""
    params = [jnp.full(shape, 0.1, dtype) for shape in _shapes(shapes)]
    steps = [
        _stepping(params, OPTIMIZERS[optimizer](), CLIPS[c]()) for c in (clip, other)
    ]
    samples = []
    for _ in range(STEPS):
        seconds = [step() for step in steps]
        samples.append(seconds[0] / seconds[1])
    return statistics.median(samples)


def _stepping(params: Any, optimizer: Any, clip: Any) -> Callable[[], float]:
    tx = optax.chain(clip, optimizer)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        grads = made(params, params, params[-1].ravel()[0] + 2)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    kept = jax.jit(lambda p: (p, tx.init(p)))(params)
    kept = jax.block_until_ready(step(*kept))

    def seconds() -> float:
        nonlocal kept
        start = time.perf_counter()
        kept = jax.block_until_ready(step(*kept))
        return time.perf_counter() - start

    return seconds


def _shapes(name: str) -> list[tuple[int, ...]]:
    if name.isdigit():
        return [(64,)] * int(name)
    tree = {
        "gpt2": lambda: trees.gpt2(768, 12, 50_257, 1024),
        "llama": lambda: trees.llama(4096, 32, 11_008, 32_000),
        "narrow llama": lambda: trees.llama(256, 32, 688, 2_000),
    }[name]()
    return jax.tree.leaves(tree, is_leaf=lambda t: isinstance(t, tuple))


def rows() -> Iterator[tuple[str, float, float]]:
    """What is measured, its figure, and the goal."""
    for name, (_, goal) in EQUATIONS.items():
        yield f"equations of {name}", equations(name), goal
    yield "lines of code", lines(), 4300
    yield "longest chain of imports", len(longest_chain()), 9
    yield "seconds to import, after jax and optax", round(import_seconds(), 3), 0.1
    yield "eager call, 6 leaves, over optax", round(eager_ratio(), 2), 1.5
    for shapes, chained, clip, goal in COMPILED:
        title = f"compile {clip}, {shapes} leaves{', with AdamW' * chained}, over optax"
        yield title, round(compile_ratio(shapes, chained, clip), 2), goal
    for n in (2000, 4000):
        title = f"seconds to compile global, {n} leaves"
        yield title, round(_seconds_of_its_own(str(n), False, "global"), 1), math.nan
    for *case, goal in STEPPED:
        shapes, dtype, optimizer, clip, other = case
        title = (
            f"step of {clip}, {shapes}, {dtype}, optimizer {optimizer}, over {other}"
        )
        yield title, round(step_ratio(*case), 3), goal


def main() -> None:
    """Measure, print a table, and keep it."""
    described = machine.describe()
    print(f"{described}\n\n| what | measured | goal |\n|---|---|---|")
    found = []
    for title, figure, goal in rows():
        print(f"| {title} | {figure} | {goal} |", flush=True)
        found.append({"what": title, "measured": figure, "goal": goal})
    kept = {"machine": described, "rows": found}
    OUT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    shapes, chained, clip = sys.argv[1:]
    print(seconds_to_compile(shapes, chained == "True", clip))
