"""Part `scopes`: the clips by leaf, axis, group and element, against their own floor.

The floor is the norms of the same scope, plain or optclip's if those are faster, and a
plain scale, as two executables on the same buffers. Beside them runs what is nearest in
optax or TensorFlow, where either has the same clip at all.
"""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optclip.functional as F
from benchmarks import trees
from benchmarks.cases import Case, Options, Row
from benchmarks.contenders import check_unguarded, plain_sum, scaled, unguarded
from benchmarks.held import Held
from benchmarks.oracle import Inspect, scope_check
from benchmarks.timing import Contender, race
from optclip.norms import Block, measure

Tree = Any
SCOPES = ("leaf", "axis", "rms", "group", "value")


def cases(options: Options) -> Iterator[Case]:
    """A race for each scope on the tree of a model and on many leaves of 64."""
    for name in ("gpt2", "equal") if not options.small else ("gpt2",):
        workload = trees.workloads(options.small)[name]
        for dtype in options.dtypes(workload):
            if workload.many and dtype != "f32" and not options.small:
                continue
            for scope in SCOPES:
                labels = {"scope": scope, "tree": name, "dtype": dtype}
                yield Case(
                    labels, _case(workload, dtype, scope, options), workload.title
                )


def _labels(tree: Tree) -> Tree:
    """Three groups, dealt in turn."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([f"group {i % 3}" for i in range(len(leaves))])


def _limit(scope: str, tree: Tree) -> float:
    """Half of what the smallest leaf, row or group measures, so that all are clipped."""
    sizes = [x.size for x in jax.tree.leaves(tree)]
    rows = [x.shape[-1] for x in jax.tree.leaves(tree)]
    return {
        "leaf": math.sqrt(min(sizes)) / 2,
        "axis": math.sqrt(min(rows)) / 2,
        "rms": 0.5,
        "group": math.sqrt(min(sum(sizes[i::3]) for i in range(3))) / 2,
        "value": 0.5,
    }[scope]


def ours(scope: str, limit: Any, labels: Tree) -> Callable[[Tree], tuple[Tree, ...]]:
    """The clip of optclip."""
    return {
        "leaf": lambda tree: (F.clip_by_norm(tree, limit),),
        "axis": lambda tree: (F.clip_by_norm(tree, limit, axis=-1),),
        "rms": lambda tree: (F.clip_by_rms(tree, limit),),
        "group": lambda tree: F.clip_by_group_norm(tree, limit, labels),
        "value": lambda tree: (F.clip_by_value(tree, -limit, limit),),
    }[scope]


def ours_unguarded(scope: str, limit: Any, labels: Tree) -> Callable[[Tree], Any]:
    """The same without the second sum of its norms, to see what that costs."""

    def clip(tree: Tree) -> tuple[Tree, ...]:
        with unguarded():
            return ours(scope, limit, labels)(tree)

    return clip


def with_zeros(scope: str, source: Tree) -> Tree:
    """The numbers, but those of one leaf or row are 0."""
    first, *rest = jax.tree.leaves(source)
    first = np.array(first)
    first.reshape(-1, first.shape[-1])[: 1 if scope == "axis" else None] = 0
    return jax.tree.unflatten(jax.tree.structure(source), [first, *rest])


def by_optax(scope: str, limit: Any, labels: Tree) -> Callable[..., Any] | None:
    """The same clip of optax, for the scopes that it has; groups are a partition."""
    if scope == "group":
        clip = optax.clip_by_global_norm(limit)
        tx = optax.partition({f"group {i}": clip for i in range(3)}, labels)
    elif scope in ("rms", "value"):
        tx = {"rms": optax.clip_by_block_rms, "value": optax.clip}[scope](limit)
    else:
        return None
    return lambda tree: (tx.update(tree, tx.init(tree))[0],)


def norms(scope: str, tree: Tree) -> list[jax.Array]:
    """The plain norms of a scope."""
    leaves = jax.tree.leaves(tree)
    if scope == "axis":
        return [jnp.sqrt(plain_sum(x, axis=-1, keepdims=True)) for x in leaves]
    sums = [plain_sum(x) for x in leaves]
    if scope == "group":
        sums = [sum(sums[i::3]) for i in range(3)]
    return [jnp.sqrt(jnp.stack(sums))]


def own_norms(scope: str, tree: Tree) -> list[jax.Array]:
    """The norms of a scope as optclip measures them."""
    leaves = jax.tree.leaves(tree)
    if scope == "axis":
        blocks = [Block([x], (x.ndim - 1,)) for x in leaves]
    elif scope == "group":
        blocks = [Block(leaves[i::3]) for i in range(3)]
    else:
        blocks = [Block([x]) for x in leaves]
    return [each.norm for each in measure(blocks)]


def scale(scope: str, tree: Tree, factors: list[jax.Array]) -> tuple[Tree, Any]:
    """A plain scale by factors of a scope, which are arguments and so are unknown."""
    leaves, structure = jax.tree.flatten(tree)
    if scope == "axis":
        each = factors
    else:
        count = len(leaves)
        each = [factors[0][i % 3 if scope == "group" else i] for i in range(count)]
    scaled_leaves = [scaled(x, by) for x, by in zip(leaves, each, strict=True)]
    return structure.unflatten(scaled_leaves), factors


def plain_value(limit: float) -> Callable[[Tree], tuple[Tree]]:
    """The floor of a clip by value, which is one pass."""
    return lambda tree: (jax.tree.map(lambda x: jnp.clip(x, -limit, limit), tree),)


def by_tensorflow(
    scope: str, limit: Any, source: Tree, check: Inspect
) -> Contender | None:
    """The clip of TensorFlow by leaf or axis, which optax lacks; not in place."""
    lacking = scope not in ("leaf", "axis") or jax.default_backend() == "gpu"
    if lacking or find_spec("tensorflow") is None:
        return None
    import tensorflow as tf

    axes = {"leaf": None, "axis": [-1]}[scope]
    tensors = [tf.constant(array) for array in jax.tree.leaves(source)]
    clip = tf.function(lambda xs: [tf.clip_by_norm(x, limit, axes) for x in xs])

    def call() -> Any:
        result = clip(tensors)
        result[-1].numpy()  # on a CPU all are there when one is
        return result

    return Contender(call, inspect=lambda xs: check([x.numpy() for x in xs]))


def floor(scope: str, held: Held, limit: Any) -> dict[str, Contender]:
    """What a scope costs at least."""
    if scope == "value":
        return {"plain clip": held.taking(plain_value(limit), _nothing)}
    if scope == "axis" and all(x.ndim == 1 for x in jax.tree.leaves(held.tree)):
        scope = "leaf"  # the same norms, which are handed on in one array
    found = jax.tree.map(
        jnp.ones_like, jax.eval_shape(lambda t: norms(scope, t), held.tree)
    )
    return {
        "norms only": held.reading(lambda tree: norms(scope, tree), _nothing),
        "own norms": held.reading(lambda tree: own_norms(scope, tree), _nothing),
        "scale only": held.taking(
            lambda tree, factors: scale(scope, tree, factors), _nothing, found
        ),
    }


def _nothing(_: Any) -> Row:
    """No check: the floor does not clip."""
    return {}


def _case(
    workload: trees.Workload, dtype: str, scope: str, options: Options
) -> Callable[[], dict[str, Row]]:
    """How to run one race."""

    def run() -> dict[str, Row]:
        source = trees.numbers(workload.shapes, dtype)
        held, limit, labels = Held(source), _limit(scope, source), _labels(source)
        checks = {
            name: scope_check(name, scope, source, limit)
            for name in ("optclip", "optax", "TensorFlow")
        }
        runners = {
            "optclip": held.taking(ours(scope, limit, labels), checks["optclip"]),
            **floor(scope, held, limit),
        }
        if workload.many and scope != "value":
            unsafe = ours_unguarded(scope, limit, labels)
            runners["unguarded"] = held.taking(unsafe, checks["optclip"])
            check_unguarded(runners["optclip"], runners["unguarded"])
        if scope in ("leaf", "axis"):
            zeros = with_zeros(scope, source)
            runners["optclip, zeros"] = held.taking(
                ours(scope, limit, labels),
                scope_check("optclip", scope, zeros, limit),
                source=zeros,
            )
        nearest = by_optax(scope, limit, labels)
        if nearest is not None:
            runners["optax"] = held.taking(nearest, checks["optax"])
        tensorflow = by_tensorflow(scope, limit, source, checks["TensorFlow"])
        if tensorflow is not None:
            runners["TensorFlow"] = tensorflow
        return race(runners, options.rounds_for(workload))

    return run
