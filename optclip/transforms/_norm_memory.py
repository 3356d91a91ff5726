"""What a norm itself remembers from step to step: vectors of the power iteration."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from optclip._arrays import _by_path, _leaves
from optclip._arrays._batching import Batched
from optclip._arrays._by_path import PerNorm
from optclip._arrays._types import TreeDef
from optclip._clip._clip import Clip
from optclip._clip._layout import Layout
from optclip.norms import Block, _matrices, _measure, _roots, _spectral
from optclip.norms._power_iteration import iterated
from optclip.norms._spectral import Spectral


def remembers(clip: Clip[Any, Any]) -> bool:
    """Whether the norm starts from what it found the step before."""
    return isinstance(clip.norm, Spectral) and clip.norm.remembers


def blank(treedef: TreeDef, vectors: list[jax.Array]) -> PerNorm:
    """The memory of a norm: the vectors of each leaf by its path."""
    kept = _by_path.keyed(treedef, vectors)
    return PerNorm(kept if isinstance(kept, dict) else {"": kept})


def starts(clip: Clip[Any, Any], layout: Layout) -> list[jax.Array]:
    """A vector of zeros for each matrix, before there is one."""
    # A sum, since on Explicit axes there are no slices of what is split.
    return [jnp.zeros_like(jnp.sum(_of(b).x, -1)) for b in clip.shown(layout)]


def measure(
    clip: Clip[Any, Any], layout: Layout, memory: PerNorm
) -> tuple[Batched, PerNorm]:
    """The norms by iteration, and the vectors to start from in the next step."""
    steps = cast(Spectral, clip.norm).steps
    vectors = list(memory.by_path.values())
    blocks = clip.shown(layout)

    def iterate(i: int) -> jax.Array:
        matrices = _of(blocks[i])
        if matrices.split:
            raise ValueError(
                "A matrix must be whole on each device inside shard_map for"
                f" method='power_iteration', got one that is split over"
                f" {matrices.split}. Give method='exact', or clip it under jit."
            )
        found, vectors[i] = iterated(matrices, vectors[i], steps)
        return _spectral.as_norm_of(blocks[i], found)

    norms = _measure.with_vectors(blocks, iterate)
    measured = Batched(norms).map(_roots.large_enough)
    return measured, blank(layout.treedef, vectors)


def _of(block: Block) -> _matrices.Matrices:
    x = _leaves.unwrap(block.leaves[0])
    return _matrices.matrices_of(block, _leaves.real_dtype(jnp.result_type(x)))
