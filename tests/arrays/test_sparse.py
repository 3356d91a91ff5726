"""BCOO leaves of all layouts are clipped as the dense gradients they represent."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from jax.experimental.sparse import BCOO

import optclip
from optclip import functional as F
from optclip import per_example, recipes
from tests.support import helpers, oracles, registry
from tests.support.leaf_kinds import wide as dense

ROWS = np.array([[1], [3], [1]])


def rows(data, dtype=np.float32):
    data = np.asarray(data, np.float32).astype(jnp.dtype(dtype))
    return BCOO((jnp.asarray(data), jnp.asarray(ROWS)), shape=(5, 2))


def global_norm_clip(mat, limit, **options):
    return F.clip_by_global_norm(mat, limit, **options)[0]


UPPER = np.arange(10, dtype=np.float32).reshape(5, 2)
MATRIX = rows([[3, 0], [0, 0], [0, 4]])
ENTRIES = BCOO((jnp.asarray(np.ones(3)), jnp.asarray(ROWS.repeat(2, 1))), shape=(5, 4))
ONE_FOR_FOUR = BCOO(
    (jnp.asarray(np.ones((1, 3))), jnp.asarray(ROWS[None])), shape=(4, 5)
)


@pytest.mark.parametrize(
    ("clip", "mat", "words"),
    [
        (
            lambda m: F.clip_by_value({"a": m}, lower=None, upper={"a": UPPER}),
            MATRIX,
            "leaf 'a', a BCOO matrix, got an array .*Pass a",
        ),
        (lambda m: F.clip_by_value(m, 0.5, 9.0), MATRIX, "`lower` .*must be at most 0"),
        (lambda m: F.clip_by_value(m, -9.0, -1.0), MATRIX, "`upper` .*at least 0"),
        *(
            (
                lambda m, axis=axis: F.clip_by_norm(m, 1.0, axis=axis),
                MATRIX,
                r"axes of a BCOO matrix, got .* the shape \(5, 2\)",
            )
            for axis in (0, -2)
        ),
        (lambda m: F.clip_by_norm(m, 1.0, axis=1), ENTRIES, r"todense\(\)"),
        (
            lambda m: F.global_norm({"w": m}),
            ONE_FOR_FOUR,
            "The leaf 'w'.*stores one batch for several.*Expand",
        ),
    ],
)
def test_sparse_leaf_that_must_be_dense_raises(clip, mat, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(clip, mat)


@dataclasses.dataclass(frozen=True)
class OneBlock(optclip.scopes.Scope):
    """Check the leaf that a user's scope receives."""

    def blocks(self, tree):
        block = optclip.norms.Block(jax.tree.leaves(tree))
        (leaf,) = block.leaves
        assert (leaf.shape, leaf.ndim, leaf.dtype) == ((5, 2), 2, jnp.float32)
        assert leaf.size == 10
        return {"all": block}

    def spread(self, values, tree):
        return jax.tree.map(lambda _: values["all"], tree)


@pytest.mark.parametrize(
    "over", [OneBlock(), optclip.axes((0, 1))], ids=["user", "axes"]
)
def test_scope_gets_sparse_leaf_as_one_matrix(over):
    tx = optclip.clip_by(1.0, over=over)
    clip = helpers.quick_jit(lambda mat: tx.update(mat, tx.init(mat))[0])
    np.testing.assert_allclose(dense(clip(MATRIX)), dense(MATRIX) / 5, rtol=1e-6)


def test_sparse_leaf_without_sparse_axes_is_clipped():
    """All axes of the matrix are batch or dense axes."""
    parts = np.full((3, 1, 4), 2, np.float32), np.zeros((3, 1, 0), np.int32)
    mat = BCOO(tuple(map(jnp.asarray, parts)), shape=(3, 4))
    clipped, norm = helpers.quick_jit(lambda m: F.clip_by_global_norm(m, 1.0))(mat)
    np.testing.assert_allclose(norm, np.sqrt(48), rtol=1e-6)
    np.testing.assert_allclose(oracles.norm(clipped.data), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("propagate", [[np.nan, 0, np.nan, 0, 0], [0, np.nan, 0, 0, np.nan]]),
        ("zero", np.zeros((2, 5))),
    ],
)
def test_nonfinite_policy_takes_duplicates_as_one_entry(policy, expected):
    indices = jnp.array([[[0], [2], [0]], [[1], [1], [4]]])
    data = jnp.array([[3.0, 4.0, jnp.nan], [3.0, 3.0, 8.0]])
    mat = BCOO((data, indices), shape=(2, 5))
    clip = helpers.quick_jit(lambda m: F.clip_by_norm(m, 5.0, nonfinite=policy))
    np.testing.assert_allclose(clip(mat).todense(), expected, rtol=1e-6)


def test_duplicates_narrow_dtypes_are_summed_in_float32():
    """Summed in float16 they would overflow; bfloat16 would lose the small ones."""
    mat = rows([[4e4, 0], [3, 0], [4e4, 0]], "float16")
    clipped, norm = helpers.quick_jit(lambda m: F.clip_by_global_norm(m, 1.0))(mat)
    np.testing.assert_allclose(norm, 8e4, rtol=1e-3)
    np.testing.assert_allclose(dense(clipped)[1, 0], 1.0, rtol=1e-3)
    many = BCOO((jnp.ones(1001, jnp.bfloat16), jnp.zeros((1001, 1), int)), shape=(3,))
    assert helpers.quick_jit(F.global_norm)(many) == 1001


@pytest.mark.parametrize("options", [{}, {"strict": True}])
def test_duplicates_sum_above_largest_float_is_clipped(options):
    """Two halves of a row whose sum float16 cannot represent."""
    halves = rows([[6e4, 0], [0, 0], [6e4, 0]], "float16")

    @helpers.quick_jit
    def clip(mat):
        by_row = F.clip_by_norm(mat, np.inf, axis=1, **options)
        return *F.clip_by_global_norm(mat, 1e5, **options), by_row

    clipped, norm, by_row = clip(halves)
    np.testing.assert_allclose(norm, 1.2e5, rtol=1e-3)
    largest = 65504 if options else 1e5
    np.testing.assert_allclose(dense(clipped)[1, 0], largest, rtol=1e-3)
    helpers.assert_identical(by_row.data, halves.data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_strict_holds_for_sums_of_duplicates(dtype):
    """Rounding duplicates towards zero one by one could increase their sum."""
    rng = np.random.default_rng(3)
    clip = helpers.quick_jit(functools.partial(global_norm_clip, strict=True))
    for _ in range(50):
        data = rng.normal(size=(3, 2))
        # Rounded duplicates nearly cancel.
        data[2] = -data[0] * (1 + 0.02 * rng.normal(size=2))
        mat = rows(data, dtype)
        limit = np.float32(rng.uniform(0.05, 0.9) * oracles.norm(dense(mat)))
        clipped = clip(mat, limit)
        assert oracles.norm(dense(clipped)) <= limit
        assert helpers.differs(clipped.data, mat.data)


@pytest.mark.parametrize(("dtype", "size"), [("int8", 128), ("uint8", 300)])
def test_duplicates_with_indices_of_few_bits_are_summed(dtype, size):
    """The dtype cannot hold the size, which JAX uses as the index of padding."""
    indices = jnp.array([[5], [100], [127], [100]], dtype)
    mat = BCOO((jnp.array([2.0, 1.0, 1.0, 1.0]), indices), shape=(size,))
    clipped, norm = helpers.quick_jit(F.clip_by_global_norm)(mat, 1.5)
    np.testing.assert_allclose(norm, 3.0, rtol=1e-6)
    np.testing.assert_allclose(dense(clipped), dense(mat) / 2, rtol=1e-6)
    assert clipped.indices.dtype == dtype


def test_duplicates_below_threshold_are_bit_identical():
    """They are neither summed nor rounded."""
    mat = rows([[1, 1], [2, 3], [0.0041, 1]], "bfloat16")

    def clips(mat):
        return [
            F.clip_by_norm(mat, 10.0, axis=1, nonfinite="zero"),
            F.clip_by_value(mat, lower=-10.0, upper=10.0, nonfinite="zero"),
            global_norm_clip(mat, 10.0),
            global_norm_clip(mat, 1.0),
        ]

    *untouched, clipped = helpers.quick_jit(clips)(mat)
    helpers.assert_identical(untouched, [mat] * 3)
    np.testing.assert_allclose(oracles.norm(dense(clipped)), 1.0, rtol=1e-2)


def test_derivative_of_sparse_normalize_at_threshold_matches_dense():
    """The coefficient is 1 there, and the response has a slope."""
    tx = optclip.clip_by(5.0, response="normalize")

    def first(data):
        mat = BCOO((data, jnp.arange(2)[:, None]), shape=(2,), unique_indices=True)
        return tx.update(mat, tx.init(mat))[0].data[0]

    slope = helpers.quick_jit(jax.grad(first))(np.float32([3, 4]))
    np.testing.assert_allclose(slope, [0.64, -0.48], rtol=1e-5)


DENSE = {"a": jnp.array([[3.0, 0.0], [4.0, 12.0]])}
CONVERSIONS = {
    "BCSR": r"BCSR.*\.to_bcoo\(\)",
    "COO": r"COO\(.*BCOO.fromdense\(",
    "CSR": r"CSR\(.*BCOO.fromdense\(",
    "CSC": r"CSC\(.*BCOO.fromdense\(",
}


def other_format(name):
    return {"a": getattr(sparse, name).fromdense(DENSE["a"])}


def call_update(make):
    return lambda tree: make().update(tree, make().init(DENSE), DENSE)


def with_params(make):
    return lambda tree: make().update(DENSE, make().init(DENSE), tree)


def quotient(params, x):
    return jnp.sum((params["a"] @ x) ** 2)


ENTRY_POINTS = {
    "init": optclip.clip_by_global_norm(1.0).init,
    "update": call_update(lambda: optclip.clip_by_global_norm(1.0)),
    "without state": call_update(lambda: optclip.clip_by_norm(1.0, record=False)),
    "agc parameters": with_params(recipes.agc),
    "clippy parameters": with_params(recipes.clippy),
    "skip": call_update(lambda: optclip.skip(optax.sgd(0.1))),
    "error feedback": optclip.recipes.uclip(optclip.clip_by_value(1.0)).init,
    "global norm": F.global_norm,
    "groups": lambda tree: F.clip_by_group_norm(
        tree, 1.0, optclip.by_path(lambda path: path)
    ),
    "measure": lambda tree: optclip.norms.measure([optclip.norms.Block([tree["a"]])]),
    "cotangents": lambda tree: optclip.clip_cotangent(tree, 1.0),
    "clipped gradient": lambda tree: per_example.clipped_grad(quotient, 1.0)(
        tree, jnp.ones((3, 2))
    ),
    "clipped sum": lambda tree: per_example.clipped_sum(tree, 1.0),
}


@pytest.mark.parametrize("call", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_sparse_format_other_than_bcoo_raises_with_conversion(name, call):
    """Measured as pytrees, their indices would be gradients."""
    with pytest.raises(
        TypeError, match=f"(?:leaf 'a'|array) must .*{CONVERSIONS[name]}"
    ):
        call(other_format(name))


@pytest.mark.parametrize("entry", registry.ENTRIES, ids=lambda entry: entry.id)
def test_every_transformation_rejects_bcsr(entry):
    for call in (entry.make().init, call_update(entry.make)):
        with pytest.raises(TypeError, match=r"leaf 'a' must .*\.to_bcoo\(\)"):
            call(other_format("BCSR"))


def test_masked_transformation_returns_other_sparse_formats_unchanged():
    tree = {**other_format("CSR"), "b": jnp.array([3.0, 4.0])}
    mask = optclip.by_path(lambda path: path != "a")
    tx = optax.masked(optclip.clip_by_global_norm(1.0), mask)
    clipped, _ = tx.update(tree, tx.init(tree))
    helpers.assert_identical(clipped["a"], tree["a"])
    np.testing.assert_allclose(clipped["b"], [0.6, 0.8], rtol=1e-6)
