"""Build one side or both sides of a row.

A side is a function of `run`, which is `jax.jit` or the identity. Arrays outside sides
are NumPy arrays, so that importing this module does not initialize JAX's devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import optclip

X = np.float32([3, 4])
Side = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class FractionOfParams:
    """Bound the norm of a unit's update by a fraction of the norm of its weights."""

    fraction: float
    floor: float = 1e-3

    def init(self, norm):
        return ()

    def update(self, seen, memory):
        norms = seen.measure(seen.params)
        limit = jax.tree.map(
            lambda n: self.fraction * jnp.maximum(n, self.floor), norms
        )
        return limit, memory


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


def adaptively(updates, params):
    """Clip vectors to a fraction of 0.1 of the norm of their parameters."""

    def ours():
        return optclip.clip_by(FractionOfParams(0.1), over=optclip.axes(0))

    theirs = clip(lambda: optax.adaptive_grad_clip(0.1), updates, params)
    return theirs, clip(ours, updates, params)


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


def in_explicit_mesh(sides: tuple[Side, Side]) -> list[Side]:
    """Shard updates and parameters over eight devices along the reduced axis."""

    def split(side):
        def other(run):
            mesh = jax.make_mesh((8,), ("x",))
            place = jax.NamedSharding(mesh, P("x"))

            def placed(step):
                return lambda *trees: run(step)(*jax.device_put(trees, place))

            with jax.set_mesh(mesh):
                return side(placed)

        return other

    return [split(side) for side in sides]


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
