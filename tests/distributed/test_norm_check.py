"""`check_norms` finds each published kind of wrong norm on a mesh, and names it.

The projects and threads are on the page Distributed training. By default optclip reads
the types of the leaves, and each norm is right; the faults are provoked by wrong
arguments in `shard_map(check_vma=False)` or `pmap`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import optclip
from tests.support import helpers

SPECS = {"dense": P(None, "tensor"), "experts": P("expert"), "scale": P()}
SHAPES = {"dense": (4, 6), "experts": (4, 3), "scale": (5,)}
NAMES = ("data", "expert", "tensor")


def gradients():
    rng = np.random.default_rng(0)
    return {k: np.float32(rng.normal(size=shape)) for k, shape in SHAPES.items()}


def sharded(kind=AxisType.Auto):
    mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=(kind,) * 3)
    places = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    return mesh, jax.device_put(gradients(), places)


def after(tx, grads, mesh=None, *, check_vma=True, **more):
    """Return the state after one step, in `shard_map` if a mesh is passed."""

    def step(grads):
        extra = {key: of(grads) for key, of in more.items()}
        return tx.update(grads, tx.init(grads), **extra)[1]

    if mesh is not None:
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(SPECS,), out_specs=P(), check_vma=check_vma
        )
    return helpers.quick_jit(step)(grads)


def clip(**options):
    return optclip.clip_by_global_norm(1.0, record="leaves", **options)


@pytest.mark.parametrize("mode", ["auto", "explicit", "types", "specs", "skip"])
def test_norms_by_default_are_those_of_whole_arrays(mode):
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh, grads = sharded(kind)
    tx = clip(axis_name=SPECS if mode == "specs" else None)
    if mode == "skip":
        tx = optclip.skip(tx, max_norm=optclip.thresholds.quantile(0.9, 4))
    mesh = None if mode in ("auto", "explicit") else mesh
    state = after(tx, grads, mesh, check_vma=mode != "specs")
    assert float(optclip.metrics(state)["clip/norm"]) > 1
    for whole in (grads, gradients()):
        check = optclip.check_norms(state, whole)
        assert check.ok
        assert not check.disagreements
        assert not check.questions
        np.testing.assert_allclose([*check.ratios.values(), check.total], 1, rtol=1e-6)
        assert check.ratios.keys() == SPECS.keys()


# The axis_name of each fault, the ratios that do not depend on the gradients, whether
# devices then differ, and words of the sentence.
DECLARED = {
    "replicas counted": (
        NAMES,
        {"dense": 4, "experts": 4, "scale": 8},
        False,
        "`scale`: 8: counted 8 times: summed over 'data' and 'expert' and",
    ),
    "replicas on tensor ranks counted": (
        {"dense": "tensor", "experts": "expert", "scale": "tensor"},
        {"dense": 1, "experts": 1, "scale": 2},
        False,
        "`scale`: 2: counted 2 times: summed over 'data' or 'expert' or 'tensor', or gathered",
    ),
    "data parallel replicas of shards counted": (
        {"dense": ("data", "tensor"), "experts": ("data", "expert"), "scale": ()},
        {"dense": 2, "experts": 2, "scale": 1},
        False,
        "`experts`: 2: counted 2 times: summed over 'data' and 'expert' or 'expert' and",
    ),
    "wrong group": (
        {"dense": "tensor", "experts": "tensor", "scale": ()},
        {"dense": 1, "scale": 1},
        True,
        "`experts`: ",
    ),
    "experts each its own": (
        {"dense": "tensor", "experts": (), "scale": ()},
        {"dense": 1, "scale": 1},
        True,
        "clip_norm",
    ),
    "local to each device": ((), {"scale": 1}, True, "clip_norm"),
}


@pytest.mark.parametrize("fault", DECLARED)
def test_wrong_axis_name_is_named(fault):
    axis_name, ratios, differs, words = DECLARED[fault]
    mesh, grads = sharded()
    state = after(clip(axis_name=axis_name), grads, mesh, check_vma=False)
    check = optclip.check_norms(state, grads)
    assert not check.ok
    for key, ratio in ratios.items():
        np.testing.assert_allclose(check.ratios[key], ratio, rtol=1e-6)
    assert any(words in x for x in [*check.findings, *check.disagreements])
    assert bool(check.disagreements) is differs
    if differs:
        assert check.findings[0].startswith("Devices hold different values of state ")


def test_averaged_norms_of_experts_are_found():
    """The norm is computed elsewhere, and passed."""
    mesh, grads = sharded()

    def averaged(grads):
        squares = {k: jnp.sum(x * x) for k, x in grads.items()}
        mean = lax.pmean(squares["experts"], "expert")
        rest = lax.psum(squares["dense"], "tensor") + squares["scale"]
        return jnp.sqrt(rest + mean)

    tx = optclip.clip_by_global_norm(1.0, use_norm="norm")
    state = after(tx, grads, mesh, norm=averaged)
    check = optclip.check_norms(state, grads)
    whole = {k: np.sum(np.float64(x) ** 2) for k, x in gradients().items()}
    expected = 1 - whole["experts"] / 2 / sum(whole.values())
    np.testing.assert_allclose([check.total, check.ratios[""]], expected, rtol=1e-6)
    assert not check.ok
    assert 'record="leaves" shows in which leaf' in check.findings[0]


def test_stages_with_states_of_their_own():
    """A norm and a threshold of all stages are right, and those of each are not."""
    stages = [{"w": x} for x in gradients().values()]
    norm = np.sqrt(sum(np.sum(np.float64(x["w"]) ** 2) for x in stages))
    for last in (1.0, 2.0):
        txs = [
            optclip.clip_by_global_norm(c, use_norm="norm") for c in (1.0, 1.0, last)
        ]
        states = [
            after(tx, x, norm=lambda _: jnp.float32(norm))
            for tx, x in zip(txs, stages, strict=True)
        ]
        check = optclip.check_norms(states, stages)
        assert check.ok is (last == 1)
        assert ("The threshold of all leaves differs" in str(check)) is not check.ok
    states = [after(clip(), x) for x in stages]
    check = optclip.check_norms(states, stages)
    assert not check.ok
    assert [*check.ratios] == ["0/w", "1/w", "2/w"]
    np.testing.assert_allclose([*check.ratios.values()], 1, rtol=1e-6)
    assert any("The norm of all leaves differs" in x for x in check.findings)
    states = [after(optclip.clip_by_norm(1.0, record="leaves"), x) for x in stages]
    assert optclip.check_norms(states, stages).ok


UNREDUCED = {
    "scaled": lambda x, i: x * (1 + i),
    # Checksums of the shards must not cancel.
    "equal shards": lambda x, i: jnp.ones_like(x) * (1 + i),
    "exchanged shards": lambda x, i: jnp.where(
        i == 0,
        x,
        lax.ppermute(x, ("expert", "tensor"), [(0, 3), (1, 2), (2, 1), (3, 0)]),
    ),
}


@pytest.mark.parametrize("case", UNREDUCED)
def test_copies_that_differ_are_named_before_ratios(case):
    """Without types, `out_specs` may call different arrays copies of one."""
    mesh, grads = sharded()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS, check_vma=False
    )
    def unreduced(grads):
        return jax.tree.map(lambda x: UNREDUCED[case](x, lax.axis_index("data")), grads)

    wrong = jax.jit(unreduced)(grads)
    state = after(clip(), gradients())
    check = optclip.check_norms(state, wrong | {"scale": grads["scale"]})
    assert check.disagreements == ["gradient `dense`", "gradient `experts`"]
    words = "Devices hold different values of gradient `dense`"
    assert check.findings[0].startswith(words)


def test_pmap_counts_each_replica_of_averaged_gradients():
    tree = gradients()

    def step(axis_name, grads):
        tx = clip(axis_name=axis_name)
        grads = lax.pmean(grads, "i")
        return tx.update(grads, tx.init(grads))[1]

    devices = jax.devices()[:2]
    stacked = jax.tree.map(lambda x: np.stack([x, x]), tree)
    for axis_name, ratio in {(): 1, "i": 2}.items():
        run = functools.partial(step, axis_name)
        state = jax.pmap(run, axis_name="i", devices=devices)(stacked)
        check = optclip.check_norms(state, tree)
        assert check.ok is (ratio == 1)
        np.testing.assert_allclose([*check.ratios.values()], ratio, rtol=1e-6)
        assert not check.disagreements
    assert "counted 2 times" in str(check)


@pytest.mark.parametrize("axis_name", [(), "i"])
def test_pmap_copies_of_gradients_are_asked_for(axis_name):
    stacked = jax.tree.map(lambda x: np.stack([x, x]), gradients())
    tx = clip(axis_name=axis_name)
    run = jax.pmap(
        lambda x: tx.update(x, tx.init(x))[1], axis_name="i", devices=jax.devices()[:2]
    )
    check = optclip.check_norms(run(stacked), stacked)
    assert check.questions[0].startswith("All gradients are 2 equal rows")


def test_copies_that_differ_are_named_by_device_and_leaves_before_their_sum():
    mesh, grads = sharded()
    shards = [x.data for x in grads["scale"].addressable_shards]
    for number, words in {1: f" on {jax.devices()[-1]} alone", 2: ""}.items():
        bad = jax.make_array_from_single_device_arrays(
            grads["scale"].shape,
            grads["scale"].sharding,
            [*shards[:-number], *(2 * x for x in shards[-number:])],
        )
        grads = grads | {"scale": bad}
        state = after(clip(axis_name=SPECS), grads, mesh, check_vma=False)
        check = optclip.check_norms(state, grads)
        assert check.disagreements[0] == f"gradient `scale`{words}"
        assert check.disagreements[1].endswith(f"clip_leaf_norm/scale`{words}")
        assert ("or this device is faulty" in check.findings[0]) is bool(words)


def test_pmap_thresholds_that_differ_are_found():
    tx = optclip.clip_by_norm(
        optclip.thresholds.quantile(0.5, 3), record="leaves", axis_name=()
    )

    def step(grads):
        return tx.update(grads, tx.init(grads))[1]

    stacked = jax.tree.map(lambda x: np.stack([x, 2 * x]), gradients())
    state = jax.pmap(step, devices=jax.devices()[:2])(stacked)
    check = optclip.check_norms(state, gradients())
    assert any("clip_memory" in x for x in check.disagreements)
