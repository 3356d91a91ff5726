"""The norms and clips that race in JAX: optclip, optax, and the floor under both."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks.held import Held
from benchmarks.oracle import SHARE, Oracle
from benchmarks.timing import Contender

Tree = Any
Clip = Callable[[Tree], tuple[Any, ...]]


def plain_norm(tree: Tree) -> jax.Array:
    """The L2 norm as one writes it down, in float32: fast, and safe from nothing."""
    return jnp.sqrt(sum(plain_sum(x) for x in jax.tree.leaves(tree)))


def plain_sum(x: jax.Array, **axes: Any) -> jax.Array:
    """The sum of squares of one leaf, in float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)), **axes)


def plain_scale(tree: Tree, by: float) -> Tree:
    """Each leaf times one number, in float32, rounded once."""
    return jax.tree.map(lambda x: scaled(x, by), tree)


def scaled(x: jax.Array, by: Any) -> jax.Array:
    """One leaf times a factor."""
    return (x.astype(jnp.float32) * by).astype(x.dtype)


NORMS: dict[str, Callable[[Tree], jax.Array]] = {
    "optclip": optclip.functional.global_norm,
    "optax": optax.tree.norm,
    "plain norm": plain_norm,
}


def clips(limit: float) -> dict[str, Clip]:
    """The clips of a whole tree, each to the tree and what else they return."""

    def by_optax(tree: Tree) -> tuple[Any, ...]:
        return (optax.clip_by_global_norm(limit).update(tree, optax.EmptyState())[0],)

    return {
        "optclip": lambda tree: optclip.functional.clip_by_global_norm(tree, limit),
        "optax": by_optax,
        "scale only": lambda tree: (plain_scale(tree, SHARE),),
        "identity": lambda tree: (tree,),
    }


def norm_race(held: Held, oracle: Oracle, names: list[str]) -> dict[str, Contender]:
    """The named norms, reading the same buffers."""
    return {name: held.reading(NORMS[name], oracle.of_norm(name)) for name in names}


def clip_race(held: Held, oracle: Oracle, names: list[str]) -> dict[str, Contender]:
    """The named clips, and the norm that is a part of the floor, on the same buffers."""
    known = clips(oracle.limit)
    race: dict[str, Contender] = {}
    for name in names:
        if name == "norm only":
            race[name] = held.reading(plain_norm, oracle.of_norm(name))
        elif name.startswith("transformation"):
            record = name.endswith("recording")
            race[name] = _transformation(held, oracle, record)
        else:
            check = name not in ("identity", "scale only")
            inspect = oracle.of_clipped(name) if check else lambda tree: {}
            race[name] = held.taking(known[name], inspect)
    return race


def _transformation(held: Held, oracle: Oracle, record: bool) -> Contender:
    """The clip as an optimizer runs it, with its state donated too."""
    tx = optclip.clip_by_global_norm(oracle.limit, record=record)
    state = jax.jit(tx.init)(held.tree)
    return held.taking(tx.update, oracle.of_clipped("optclip"), state)
