"""What is computed for many norms at once: each as if it were alone."""

import dataclasses
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optclip
from optclip import functional, responses, thresholds
from optclip._arrays._batching import MANY, Batched, each
from tests.support.helpers import quick_jit, strict


def leaves(dtype=jnp.float32):
    """Of one number and of few, past the threshold of 1 and not; zero, huge, tiny."""
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (1,), (), (2, 2), (1, 1)]
    scales = [5, 0.1, 1e30, 0.2, 3, 2]
    # And as many of one type as are reduced at once.
    shapes += [(3,)] * 4
    assert MANY == 4
    scales += [1e30, 6, 0, 1e-30]
    found = [
        jnp.asarray(rng.normal(size=shape) * scale, jnp.float32).astype(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    assert len({x.shape for x in found}) < len(found)
    return found


def alone(function):
    """What a function of a list makes of each leaf of one, compiled once a shape."""
    return lambda tree: [function([x]) for x in tree]


def same(found, expected):
    def check(a, b):
        wide = np.complex64 if jnp.iscomplexobj(b) else np.float32
        np.testing.assert_array_equal(np.asarray(a, wide), np.asarray(b, wide))

    jax.tree.map(check, found, expected)


def close(found, expected):
    """Logarithms and powers of vectors are others than those of numbers, to an ULP."""
    for a, b in zip(found, expected, strict=True):
        rtol = max(1e-6, float(jnp.finfo(b.dtype).eps))
        wide = np.complex64 if jnp.iscomplexobj(b) else np.float32
        chex.assert_trees_all_close(np.asarray(a, wide), np.asarray(b, wide), rtol=rtol)


def test_entries_come_back_in_order():
    entries = [
        (jnp.float32(1), jnp.ones(2)),
        (jnp.float32(2), jnp.float32(3)),
        (jnp.float32(4), jnp.ones((1, 1))),
        *[(jnp.float32(5), jnp.float32(i)) for i in range(MANY - 1)],
        (jnp.bfloat16(7), jnp.float32(8)),
    ]
    rows = Batched(entries)
    assert rows.indices == ((0,), (1, 3, 4, 5), (2,), (6,))
    same(rows.entries(), entries)
    doubled = rows.map(lambda pair, other: pair[0] + 2 * other[0], rows)
    same(doubled.entries(), [3 * entry[0] for entry in entries])


def test_numbers_of_each_kind_are_looked_up():
    entries = [
        number
        for i in range(MANY)
        for number in (jnp.float32(i), jnp.int32(2**31 - 1 - i), jnp.bool_(i % 2))
    ]
    same(jax.jit(lambda entries: Batched(entries).entries())(entries), entries)


def test_few_entries_are_not_stacked():
    assert Batched([jnp.float32(1)] * (MANY - 1)).indices == ((0,), (1,), (2,))


def test_rows_of_other_entries_are_refused():
    one, other = Batched([jnp.ones(1)] * MANY), Batched([jnp.ones(2)] * MANY)
    with pytest.raises(ValueError, match="of the same entries"):
        one.map(lambda x, y: x + y, other)


def test_what_is_declared_keeps_entries_apart():
    rows = Batched([jnp.ones(1)] * 8, declared=("a", "b") * 4)
    assert rows.indices == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_each_is_a_map_over_trees():
    tree = {"a": jnp.float32(1), "b": [jnp.ones(2), jnp.float32(3)], "c": None}
    found = each(lambda x, y: (x + y, x.ndim), tree, tree)
    assert found["b"][1] == (6, 0)
    assert found["b"][0][1] == 1
    assert found["c"] is None
    assert each(lambda x: x, ()) == ()


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad", "hessian"])
def test_rows_keep_to_their_entries_under_transformations(transform):
    vector = jnp.arange(1.0, 5.0)

    def cubes(x):
        rows = Batched(list(jnp.unstack(x))).map(lambda n: n**3)
        return sum(i * n for i, n in enumerate(rows.entries()))

    plain = (jnp.arange(4.0) * vector**3).sum()
    if transform == "vmap":
        found = jax.vmap(cubes)(jnp.stack([vector, vector]))
        np.testing.assert_array_equal(found, [plain] * 2)
        return
    expected = {
        "jit": plain,
        "grad": 3 * jnp.arange(4) * vector**2,
        "hessian": jnp.diag(6 * jnp.arange(4) * vector),
    }[transform]
    for function in (cubes, jax.jit(cubes)):
        found = getattr(jax, transform)(function)(vector)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def own(norm, threshold):
    return jnp.minimum(1, threshold / (norm + 1))


class Response(NamedTuple):
    """A response, strict or not, and by whom it is asked what of how many norms."""

    name: str
    given: Any
    traits: tuple[str, ...]
    is_strict: bool = False


def ours(name, given=None, **kwargs):
    return Response(name, name if given is None else given, ("ours",), **kwargs)


RESPONSES = [
    ours("hard"),
    ours("smooth"),
    ours("normalize"),
    ours("tanh"),
    ours("proportional"),
    ours("band", responses.band(0.5)),
    ours("detached", responses.detached("hard")),
    ours("strict", "hard", is_strict=True),
    Response("own", own, ("own",)),
    Response("own-strict", own, ("own",), is_strict=True),
]


@pytest.mark.covering(over=["leaf", optclip.axes(-1), "element"], response=RESPONSES)
def test_a_leaf_among_many_is_clipped_as_alone(over, response):
    tree = leaves()
    if over == optclip.axes(-1):
        tree = [x for x in tree if x.ndim]
    tx = strict(
        optclip.clip_by(
            1.0, over=over, response=response.given, strict=response.is_strict
        )
    )
    clip = quick_jit(lambda updates: tx.update(updates, tx.init(updates))[0])
    found = clip(tree)
    close(found, [x for (x,) in alone(clip)(tree)])
    assert any((a != b).any() for a, b in zip(found, tree, strict=True))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_policies_of_leaves_among_many(dtype):
    tree = leaves(dtype)
    tree[1] = tree[1].at[0].set(jnp.inf)
    tree[3] = jnp.full_like(tree[3], jnp.nan)

    @quick_jit
    def clip(updates):
        return {
            policy: functional.clip_by_norm(updates, 1.0, nonfinite=policy)
            for policy in ("propagate", "zero", "drop")
        }

    expected = alone(clip)(tree)
    for policy, found in clip(tree).items():
        close(found, [each[policy][0] for each in expected])
        assert np.any(found[1] == 0) == (policy != "propagate")


def test_many_leaves_are_the_same_outside_of_jit():
    """Where a number is taken from its row by an index that is an argument."""
    tree = leaves()
    tx = strict(optclip.clip_by_norm(1.0, record="leaves"))
    found, state = tx.update(tree, tx.init(tree))
    update = quick_jit(tx.update)
    expected = alone(lambda t: update(t, tx.init(t)))(tree)
    close(found, [x for (x,), _ in expected])
    for i, (_, own) in enumerate(expected):
        records = state.clip_record["clip"], own.clip_record["clip"]
        together, apart = (record.clip_coefficient for record in records)
        close([together[str(i)]], [apart["0"]])


def test_thresholds_of_many_shapes():
    """Traced and not, by leaf, None among them, and of one number in an axis."""
    tree = {"a": jnp.full(1, 9.0), "b": jnp.full(1, 9.0), "c": jnp.full(1, 9.0)}

    def clip(updates, limit):
        limits = {"a": limit, "b": jnp.full(1, 2.0), "c": None}
        return functional.clip_by_norm(updates, limits, axis=0)

    found = quick_jit(clip)(tree, jnp.float32(3))
    same(found, {"a": jnp.full(1, 3.0), "b": jnp.full(1, 2.0), "c": jnp.full(1, 9.0)})


def test_bounds_of_many_shapes():
    """Of elements: none of which is held against the shape of another's."""
    tree = {"a": jnp.full(1, 9.0), "b": jnp.full(1, 9.0), "c": jnp.full(1, 9.0)}
    lower = {"a": -1.0, "b": jnp.full(1, -2.0), "c": None}
    upper = {"a": jnp.full(1, 3.0), "b": 2.0, "c": None}
    tx = strict(
        optclip.clip_by(
            thresholds.bounds(lower, upper),
            over="element",
            clip_mask={"a": True, "b": False, "c": True},
        )
    )
    clipped, state = quick_jit(tx.update)(tree, tx.init(tree))
    same(clipped, {"a": jnp.full(1, 3.0), "b": tree["b"], "c": tree["c"]})
    numbers = optclip.metrics(state)
    assert numbers["clip/threshold"] == 1
    assert numbers["clip/norm"] == 9


def test_a_response_of_ones_own_sees_numbers():
    """Outside of jit it may ask questions about them."""

    def halved(norm, threshold):
        return 0.5 if norm > threshold else 1.0

    tree = [jnp.full(3, 9.0), jnp.full(3, 0.1), jnp.full(3, 9.0)]
    tx = optclip.clip_by_norm(1.0, response=halved)
    found, _ = tx.update(tree, tx.init(tree))
    same(found, [tree[0] / 2, tree[1], tree[2] / 2])


def test_a_subclass_of_a_response_is_ones_own():
    class Halved(responses.Hard):
        def coefficient(self, norm, threshold):
            return 0.5 if norm > threshold else 1.0

    tree = [jnp.full(3, 9.0), jnp.full(3, 0.1), jnp.full(3, 9.0)]
    tx = optclip.clip_by_norm(1.0, response=Halved())
    found, _ = tx.update(tree, tx.init(tree))
    same(found, [tree[0] / 2, tree[1], tree[2] / 2])


@dataclasses.dataclass(frozen=True)
class Keeps:
    """Shows `keep` a plain number, and remembers what it said."""

    limit: object

    def init(self, norm):
        return norm

    def update(self, seen, memory):
        return jnp.float32(1), seen.keep(self.limit)


@pytest.mark.parametrize(
    ("limit", "kept", "options"),
    [
        (1e300, np.finfo(np.float32).max, {"response": "normalize"}),
        (0.1, np.float32(0.1) * (1 - 2**-13), {"strict": True}),
    ],
)
def test_what_a_plain_number_would_keep(limit, kept, options):
    """A finite one stays finite, and a strict one is not rounded up."""
    tree = [jnp.full(3, 9.0), jnp.full(3, 9.0)]
    tx = optclip.clip_by_norm(Keeps(limit), **options)
    _, state = quick_jit(tx.update)(tree, tx.init(tree))
    for found in state.clip_memory[0][0].by_path.values():
        assert np.isfinite(found)
        np.testing.assert_allclose(found, kept, rtol=1e-5)
        assert float(found) <= limit


def test_keep_names_itself_where_it_is_shown_another_tree():
    tree = {"a": jnp.full(3, 9.0), "b": jnp.full(3, 9.0)}
    tx = optclip.clip_by_norm(Keeps({"a": 1.0}))
    with pytest.raises(ValueError, match=r"keep\(threshold\) .*lacks 'b'"):
        tx.update(tree, tx.init(tree))


def test_what_is_kept_of_elements():
    """By bounds of the shapes that users give."""
    tree = {"a": jnp.full(1, 9.0), "b": jnp.full((1, 1), 9.0), "c": jnp.full(2, 9.0)}
    tx = optclip.clip_by(Keeps(2.0), over="element")
    _, state = quick_jit(tx.update)(tree, tx.init(tree))
    same(state.clip_memory[0][0], jax.tree.map(lambda x: jnp.full_like(x, 2.0), tree))


class Draws:
    """Remembers keys."""

    def init(self, norm):
        return jax.tree.map(lambda n: jax.random.key(0), norm)

    def update(self, seen, memory):
        new = jax.tree.map(lambda key: jax.random.fold_in(key, 1), memory)
        return jnp.float32(1), new


def test_prng_keys_are_remembered_by_a_rule():
    tree = [jnp.full(3, 9.0), jnp.full(3, 9.0)]
    tx = optclip.clip_by_norm(Draws())
    _, state = quick_jit(tx.update)(tree, tx.init(tree))
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1))
    for key in state.clip_memory[0][0].by_path.values():
        same(jax.random.key_data(key), expected)


def test_split_over_one_device():
    """Norms keep the axis of an Explicit mesh that has one device on it."""
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec(None, "x"))
        tree = [jax.device_put(jnp.full((4, 1), x), place) for x in (3.0, 0.1)]
        found = quick_jit(lambda t: functional.clip_by_norm(t, 1.0, axis=0))(tree)
    np.testing.assert_allclose(found[0], jnp.full((4, 1), 0.5), rtol=1e-6)
    same(found[1], tree[1])
    assert all(x.sharding == place for x in found)


def test_parameters_that_have_no_update():
    """Are measured as what they are, not as the next one that has."""
    tx = optclip.recipes.agc()
    params = {"frozen": jnp.full(3, 50.0), "w": jnp.ones(3)}
    updates = {"frozen": None, "w": jnp.ones(3)}
    found, _ = quick_jit(tx.update)(updates, tx.init(params), params)
    np.testing.assert_allclose(found["w"], 0.01, rtol=1e-5)


RULES = {
    "ema": thresholds.ema(warmup=0),
    "zscore": thresholds.zscore(0.5, warmup=2),
    "quantile": thresholds.quantile(0.5, window=3),
    "mean_over_rms": thresholds.mean_over_rms(),
}


@pytest.mark.parametrize("name", RULES)
def test_a_leaf_among_many_is_remembered_as_alone(name):
    tx = strict(optclip.clip_by_norm(RULES[name], record="leaves"))
    tree = leaves()
    state, apart = tx.init(tree), [tx.init([x]) for x in tree]
    update, was_clipped = quick_jit(tx.update), False
    for step in range(1, 6):
        given = [x * (step % 3) for x in tree]
        found, state = update(given, state)
        for i, x in enumerate(given):
            (expected,), apart[i] = update([x], apart[i])
            close([found[i]], [expected])
            was_clipped |= bool((expected != x).any())
    records = [own.clip_record["clip"] for own in apart]
    for field in {*state.clip_record["clip"]._fields} - {"clip_leaf_norm"}:
        together = getattr(state.clip_record["clip"], field)
        for i, record in enumerate(records):
            expected = getattr(record, field)["0"]
            np.testing.assert_allclose(together[str(i)], expected, rtol=1e-6)
    assert was_clipped


def kernels(method, num_leaves):
    """The kernels of a clip by leaf, as XLA for CPU writes them, each once."""
    tree = [jax.ShapeDtypeStruct((5,), jnp.float32)] * num_leaves
    tx = method()
    state = jax.eval_shape(tx.init, tree)
    text = jax.jit(tx.update).lower(tree, state, tree).compile().as_text()
    bodies = re.findall(r"^%fused_computation\S* [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    plain = re.compile(r", metadata=\{[^}]*\}|(?<=[a-z_])[\d.]+|\.\d+")
    return {plain.sub("", body) for body in bodies}


@pytest.mark.parametrize(
    "method",
    [
        lambda: optclip.clip_by_norm(1.0),
        lambda: optclip.clip_by_norm(1.0, record="leaves"),
        lambda: optclip.clip_by_norm(RULES["zscore"]),
        optclip.recipes.adagc,
        optclip.recipes.agc,
        optclip.recipes.olmo_ratio,
    ],
    ids=["plain", "recorded", "zscore", "adagc", "agc", "olmo_ratio"],
)
def test_the_leaves_share_their_kernels(method):
    """With the number of a leaf in it no kernel is that of another, and all compile."""
    of_few, of_many = kernels(method, 10), kernels(method, 20)
    assert of_few
    # Of one that were compiled for each leaf there would be ten more.
    assert len(of_many) <= len(of_few) + 5
