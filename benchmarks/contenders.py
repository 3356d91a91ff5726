"""The norms and clips that race in JAX: optclip, optax, and the floor under both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import optclip
from benchmarks.held import Held
from benchmarks.oracle import SHARE, Oracle
from benchmarks.timing import Contender
from optclip.norms import _roots

Tree = Any
Clip = Callable[[Tree], tuple[Any, ...]]


def plain_norm(tree: Tree) -> jax.Array:
    """The L2 norm as one writes it down, in float32: fast, and safe from nothing."""
    return jnp.sqrt(sum(plain_sum(x) for x in jax.tree.leaves(tree)))


def plain_sum(x: jax.Array, **axes: Any) -> jax.Array:
    """The sum of squares of one leaf, in float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)), **axes)


def plain_scale(tree: Tree, by: Any) -> Tree:
    """Each leaf times one number, in float32, rounded once."""
    return jax.tree.map(lambda x: scaled(x, by), tree)


def scaled(x: jax.Array, by: Any) -> jax.Array:
    """One leaf times a factor."""
    return (x.astype(jnp.float32) * by).astype(x.dtype)


@contextmanager
def unguarded() -> Iterator[None]:
    """Traces optclip without the second sum that keeps its norms from overflow."""
    kept = unwrap(_roots._compiled)
    # Compiled by itself, or jit would take what it has traced with the second sum.
    fresh = jax.jit(lambda arrays, plan: kept(arrays, plan), static_argnums=1)
    with (
        mock.patch.object(_roots, "_compiled", fresh),
        mock.patch.object(_roots, "_may_overflow", return_value=False),
    ):
        yield


def one_pass(tree: Tree) -> jax.Array:
    """The norm of optclip, unguarded."""
    with unguarded():
        return optclip.functional.global_norm(tree)


NORMS: dict[str, Callable[[Tree], jax.Array]] = {
    "optclip": optclip.functional.global_norm,
    "optax": optax.tree.norm,
    "one pass": one_pass,
    "plain norm": plain_norm,
}
# XLA copies float16 to float32 before a plain norm, which costs more than our clip.
FLOOR_NORMS = {"norm only": plain_norm, "own norm": optclip.functional.global_norm}


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
    race = {name: held.reading(NORMS[name], oracle.of_norm(name)) for name in names}
    if "one pass" in race:
        check_unguarded(race["optclip"], race["one pass"])
    return race


def check_unguarded(guarded: Contender, bare: Contender) -> None:
    """Raise unless only the first has a branch to a second sum."""
    branches = [each.facts["branches"] for each in (guarded, bare)]
    if not branches[0] or branches[1]:
        raise AssertionError(f"with and without a second sum: {branches} branches")


def clip_race(held: Held, oracle: Oracle, names: list[str]) -> dict[str, Contender]:
    """The named clips, and the norms for the floor, on the same buffers."""
    known = clips(oracle.limit)
    race: dict[str, Contender] = {}
    for name in names:
        if name in FLOOR_NORMS:
            race[name] = held.reading(FLOOR_NORMS[name], oracle.of_norm(name))
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
