"""Write the table of `docs/migrating.md`: inputs on which optax fails.

Run `python -m docs.plots_and_tables.comparison`.

A side of a row is a function of `run`, which is `jax.jit` or the identity. Arrays
outside sides are NumPy arrays, so that importing this module does not initialize JAX's
devices.
"""

import contextlib
import dataclasses
import functools
import io
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import optclip

PATH = pathlib.Path(__file__).resolve().parents[1] / "migrating.md"
MARKED = re.compile(
    r"(?<=<!-- incumbents -->\n).*?(?=<!-- end of incumbents -->)", re.DOTALL
)
X = np.float32([3, 4])
Side = Callable[[Any], Any]


def eager(function):
    return function


def on_device(tree: Any) -> Any:
    """Convert NumPy arrays to JAX arrays; Python numbers stay unchanged."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
    )


def clip(make: Callable[[], Any], updates: Any, params: Any = None) -> Side:
    """Return the updates of a transformation's first step."""

    def side(run):
        tx = make()

        def step(updates, params):
            state = tx.init(updates if params is None else params)
            return tx.update(updates, state, params)[0]

        return run(step)(on_device(updates), on_device(params))

    return side


def of(factory: Callable[[Any], Any], limit: Any, updates: Any) -> Side:
    return clip(lambda: factory(limit), updates)


def globally(limit, updates):
    clips = optax.clip_by_global_norm, optclip.clip_by_global_norm
    return tuple(of(factory, limit, updates) for factory in clips)


def injected(limit, params, steps=1) -> tuple[Side, Side]:
    """Return the updates of each step under `inject_hyperparams`."""

    def through(factory):
        def side(run):
            tx = optax.inject_hyperparams(factory)(max_norm=limit())
            grads = on_device(params)
            state, updates_of_steps = tx.init(grads), []
            for _ in range(steps):
                updates, state = run(tx.update)(grads, state, grads)
                updates_of_steps.append(updates)
            return updates_of_steps

        return side

    return through(optax.clip_by_global_norm), through(optclip.clip_by_global_norm)


def each(sides: dict[str, Side]) -> Side:
    """Combine several sides into a dict of results."""
    return lambda run: {key: side(run) for key, side in sides.items()}


def policies(factory, limit, updates) -> Side:
    def one(policy):
        return of(lambda limit: factory(limit, nonfinite=policy), limit, updates)

    return each({name: one(name) for name in ("propagate", "zero")})


def slope(make) -> Side:
    """Differentiate the sum of the clipped updates at zero."""

    def side(run):
        tx = make()
        return run(jax.grad(lambda u: jnp.sum(tx.update(u, tx.init(u))[0])))(
            jnp.zeros(2)
        )

    return side


def in_shard_map(make) -> Side:
    """Clip in `shard_map` on eight devices, each with one entry; always compiled."""

    def side(run):
        del run
        tx = make()
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        step = jax.shard_map(
            lambda u: tx.update(u, tx.init(u))[0],
            mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        )  # fmt: skip
        return jax.jit(step)(10 * jnp.arange(1.0, 9.0))

    return side


def scanned(make, read) -> Side:
    """Read from the state in each of three steps of a scan."""

    def side(run):
        tx = make()

        def step(state, size):
            _, state = tx.update(size * jnp.asarray(X), state)
            return state, read(state)

        def steps(sizes):
            return jax.lax.scan(step, tx.init(jnp.asarray(X)), sizes)[1]

        return run(steps)(jnp.arange(1.0, 4.0))

    return side


def above_the_bound(make, vectors) -> Side:
    """Return the norms, in float64, of vectors clipped one by one."""

    def side(run):
        tx = make()
        clipped = run(jax.vmap(lambda u: tx.update(u, tx.init(u))[0]))(vectors)
        return np.linalg.norm(np.asarray(clipped, np.float64), axis=1)

    return side


def text(value: Any) -> str:
    """Format numbers with three digits, flatten trees, and keep strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "; ".join(f"{key}: {text(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text(part) for part in value)
    if np.ndim(value):
        return f"[{', '.join(text(part) for part in np.asarray(value))}]"
    # Adding 0 turns -0 into 0.
    return f"{float(value) + 0:.3g}".replace("nan", "NaN")


def norm(tree: Any) -> str:
    """Format the norm of a result, computed in float64."""
    squares = [np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)]
    return f"norm {np.sqrt(sum(squares)):.3g}"


def above_one(norms: Any) -> str:
    return "some above 1" if np.any(norms > 1) else "none above 1"


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold an input, both sides, how to show results, and a note on optclip's.

    `run` compiles both sides. Rows with hundreds of leaves run eagerly, since their few
    operations compile faster than the whole program.
    """

    text: str
    theirs: Side
    ours: Side
    show: Callable[[Any], Any] = lambda result: result
    note: str = ""
    run: Callable[[Any], Any] = jax.jit


BF16, INF = jnp.bfloat16, np.inf
HALF, BRAIN = np.float16([300, 400]), X.astype(BF16)
BAD = [np.float32([INF, 4]), np.float32([3])]
NORMAL = np.random.default_rng(0).normal(size=(200, 1000)).astype(np.float32)

GLOBAL, OURS = optax.clip_by_global_norm, optclip.clip_by_global_norm


# fmt: off
ROWS = [
    Row("`clip_by_global_norm(1)`, float16 `[300, 400]`", *globally(1.0, HALF)),
    Row("`clip_by_global_norm(1)`, leaves `[inf, 4]` and `[3]`",
        of(GLOBAL, 1.0, BAD), policies(OURS, 1.0, BAD), note="by `nonfinite=`"),
    Row("`clip_by_global_norm(1)`, 200 bfloat16 leaves of 1000 normal numbers",
        *globally(1.0, list(NORMAL.astype(BF16))), show=norm, run=eager),
    Row("`inject_hyperparams(clip_by_global_norm)`, `linear_schedule(2, 1, 2)`, bfloat16 `[3, 4]`, three steps",
        *injected(lambda: optax.linear_schedule(2.0, 1.0, 2), BRAIN, steps=3)),
    Row("the gradient of the sum of `clip_by_global_norm(1)`, at `[0, 0]`",
        slope(lambda: GLOBAL(1.0)), slope(lambda: OURS(1.0))),
    Row("`clip_by_global_norm(1)` in `jax.shard_map` on an Auto mesh, one of `[10, 20, .., 80]` on each of 8 devices",
        in_shard_map(lambda: GLOBAL(1.0)), in_shard_map(lambda: OURS(1.0)), show=norm),
    Row("`clip_by_global_norm(1)`, leaves float32 `[3, 4]` and int32 `[7]`", *globally(1.0, [X, np.int32([7])])),
    Row("`clip_by_global_norm(constant_schedule(1))`, `[3, 4]`", *globally(optax.constant_schedule(1.0), X)),
    Row("the norm of `[3, 4]` times 1, 2, 3, kept in the state in `jax.lax.scan` (`optax.monitor`, `optclip.metrics`)",
        scanned(lambda: optax.monitor({"norm": optax.tree.norm}), lambda s: optax.tree.get(s, "norm")),
        scanned(lambda: OURS(1.0), lambda s: optclip.metrics(s)["clip/norm"])),
    Row("`clip_by_global_norm(1)`, 200 float32 vectors of 1000 normal numbers: norms after, in float64",
        above_the_bound(lambda: GLOBAL(1.0), NORMAL), above_the_bound(lambda: OURS(1.0, strict=True), NORMAL), show=above_one, note="with `strict=True`"),
]
# fmt: on


@functools.cache
def result(row: Row, side: Side) -> Any:
    """Run a side of a row; each side is run once in a process."""
    # JAX prints a message under jax.debug_nans.
    with contextlib.redirect_stdout(io.StringIO()):
        return side(row.run)


def observed(row: Row, side: Side) -> str:
    """Return the result of a side in a few characters, or the class of its error."""
    try:
        return text(row.show(result(row, side)))
    except Exception as error:
        return type(error).__name__


def new_table() -> str:
    """Run all rows and return the table."""
    head = f"| input | optax {optax.__version__} | optclip |\n|---|---|---|\n"
    return head + "".join(_line(row) for row in ROWS)


def current_table() -> str:
    """Return the table on the page."""
    (table,) = MARKED.findall(PATH.read_text())
    return table


def with_table(page: str) -> str:
    """Return the page with a new table."""
    table = new_table()
    return MARKED.sub(lambda match: table, page)


def _line(row: Row) -> str:
    theirs, ours = observed(row, row.theirs), observed(row, row.ours)
    note = f" ({row.note})" if row.note else ""
    return f"| {row.text} | `{theirs}` | `{ours}`{note} |\n"


if __name__ == "__main__":
    # Two rows shard their updates over eight devices, which JAX simulates on a CPU.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    PATH.write_text(with_table(PATH.read_text()))
