"""`explain` compares a step with the recorded run that it belongs to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip

CHARACTERS, LENGTH, BATCH, STEPS = 64, 16, 16, 90
CHANGED, BAD, OUTLIER, NAN = 75, 80, 83, 86


def losses(params, text, weights):
    """Return the loss of each next character."""
    hidden = jnp.tanh(params["embed"][text[:, :-1]])
    logits = (hidden @ params["out"] + params["bias"]).astype(jnp.float32)
    scores = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return weights * scores


@functools.cache
def batches():
    """Return texts that mostly count upward, one of random bytes, and weights."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, CHARACTERS, (STEPS, BATCH, 1))
    text = (starts + np.arange(LENGTH)) % CHARACTERS
    noise = rng.integers(0, CHARACTERS, text.shape)
    text = np.where(rng.random(text.shape) < 0.2, noise, text)
    text[BAD] = noise[BAD]
    weights = np.ones((STEPS, BATCH, 1), np.float32)
    weights[OUTLIER, 5], weights[NAN, 2] = 1000, np.nan
    return text, weights


def batch_of(i):
    return tuple(x[i] for x in batches())


def flip(grads, bit):
    """Flip a bit of the largest element of a leaf."""
    out = np.array(grads["out"], np.float32)
    out.view(np.uint32).flat[np.argmax(np.abs(out))] ^= np.uint32(1 << bit)
    return grads | {"out": jnp.asarray(out)}


@jax.jit
def gradient(params, batch):
    return jax.value_and_grad(lambda w: jnp.mean(losses(w, *batch)))(params)


@functools.cache
def compiled(tx):
    return jax.jit(tx.update)


def trained(tx, change=lambda grads, params: grads, dtype=jnp.float32, put=lambda x: x):
    """Return the parameters before each step, and the last state."""
    rng = np.random.default_rng(1)
    shapes = {"embed": (CHARACTERS, 32), "out": (32, CHARACTERS), "bias": CHARACTERS}
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
    state, update, before = tx.init(params), compiled(tx), []
    for i in range(STEPS):
        before.append(params)
        value, grads = gradient(params, put(batch_of(i)))
        grads = change(grads, params) if i == CHANGED else grads
        updates, state = update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
    return before, state


@functools.cache
def optimizer(record=True, max_norm=5.0):
    tx = optclip.skip(optax.adam(0.1), max_norm=max_norm, record=record)
    return optclip.with_history(tx, steps=STEPS - 5)


@functools.cache
def sound(record=True):
    return trained(optimizer(record))


def explained(run, i, **options):
    before, state = run
    return optclip.explain(losses, before[i], *batch_of(i), history=state, **options)


def test_batch_that_is_bad_as_a_whole_is_named_first():
    before, state = sound()
    history = optclip.history(state)
    columns = {key: x.tolist() for key, x in history.items()}
    rows = zip(*columns.values(), strict=True)
    log = [dict(zip(columns, row, strict=True)) for row in rows]
    column = {"loss": columns["loss"], "grad_norm": columns["skip/norm"]}
    pairs = [{"loss": row["loss"], "grad_norm": row["skip/norm"]} for row in log]
    for form in (history, state, log, column, pairs):
        found = explained((before, form), BAD)
        assert found.findings[0].startswith("The whole batch: mean loss 5.")
        assert f"all {BATCH} examples lie between 5." in found.findings[0]
        assert ", usually 2." in found.findings[0]
    for i in (5, BAD - 1, STEPS - 1):
        assert explained(sound(), i).findings == []


@pytest.mark.parametrize("record", [True, "leaves"])
@pytest.mark.parametrize("i", [5, CHANGED, BAD, OUTLIER, NAN, STEPS - 1])
def test_sound_step_is_reproduced(record, i):
    """Also a skipped one. Then the batch is named, and the example."""
    found = explained(sound(record), i, step=jnp.int32(i))
    assert found.reproduced
    numbers = (
        f"loss {found.loss:.4g}, norm " if i != NAN else "loss not finite, norm not "
    )
    assert found.findings[0].startswith(f"Step {i} is reproduced: {numbers}")
    others = {BAD: ["The whole batch: "], OUTLIER: ["The whole batch: ", "9"]}
    which = "1 of 16 examples above 62: 5."
    assert any(which in text for text in found.findings) == (i == OUTLIER)
    others[NAN] = ["15 losses", "NaN or inf"]
    assert ("Nothing else stands out" in str(found)) == (i not in others)
    for text, start in zip(found.findings[1:], others.get(i, []), strict=False):
        assert text.startswith(start)


@pytest.mark.parametrize("kind", ["loss", "clip/norm"])
@pytest.mark.parametrize("number", [1, 8, 30])
def test_bad_batch_is_not_compared_with_its_own_rows(number, kind):
    """The state is saved after bad steps, and the step is not known."""
    rng = np.random.default_rng(0)
    usual = np.linspace(3, 1.5, 300) + 0.1 * rng.normal(size=300)
    bad = {"loss": 99.0, "clip/norm": 57.74}[kind]
    recorded = np.append(usual, bad + 0.1 * rng.normal(size=number))
    history = {"step": np.arange(len(recorded)), "clip/norm": 0 * recorded + 57.74}
    found = explain_linear(100 * np.eye(3), history | {kind: recorded}, None)
    name = {"loss": "mean loss 99", "clip/norm": "norm 57.74"}[kind]
    assert found.findings[0].startswith(f"The whole batch: {name}, usually 1.")


CHANGES = {
    "bit 30": lambda grads, params: flip(grads, 30),
    "bit 25": lambda grads, params: flip(grads, 25),
    "nan": lambda grads, params: grads | {"out": grads["out"] * jnp.nan},
    "another seed": lambda grads, params: grads | {"out": grads["out"] * 1.3},
    "weight decay": lambda grads, params: optax.tree.add_scale(grads, 0.1, params),
}


@pytest.mark.parametrize("record", [True, "leaves"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_gradient_is_not_reproduced(change, record):
    run = trained(optimizer(record), CHANGES[change])
    found = explained(run, CHANGED, step=CHANGED)
    assert not found.reproduced
    (text,) = found.findings
    norm = optclip.history(run[1])["skip/norm"][CHANGED - 5]
    numbers = f"recorded norm {norm:.4g}, recomputed {found.norm:.4g}"
    numbers = numbers.replace(" nan", " not finite")
    assert text.startswith(f"Step {CHANGED}: {numbers}: not reproducible from these ")
    is_sure = record == "leaves" and change in {"nan", "bit 30", "bit 25"}
    words = "Other leaves are reproduced too: hardware is the likely cause"
    hedged = "Look at hardware or random seeds, unless the recorded norm is not the L2"
    assert (words in text, hedged in text) == (is_sure, not is_sure)
    names = ["`bias`", "`embed`", "`out`"] if "weight" in change else ["`out`"]
    phrases = [f"Leaves that differ: {len(names)} of 3, "]
    phrases += [f"{name} (recorded " for name in names]
    assert {phrase in text for phrase in phrases} == {record == "leaves"}
    assert explained(run, CHANGED + 1, step=CHANGED + 1).reproduced


def linear(w, x):
    return x @ w - 1


def explain_linear(x, state, step):
    return optclip.explain(linear, jnp.ones(3), x, history=state, step=step)


def test_bare_array_without_norms_of_leaves_is_compared():
    clip = optclip.clip_by_global_norm(1.0)
    tx = optclip.with_history(optax.chain(clip, optax.sgd(0.1)))
    w, state = jnp.ones(3), tx.init(jnp.ones(3))
    for _ in range(10):
        _, state = tx.update(w, state)
    (text,) = explain_linear(50 * np.eye(3), state, 9).findings
    assert "recorded norm 1.732, recomputed 28.87: not reproducible" in text
    assert "Look at hardware, random seeds or other parameters, unless" in text
    text = explain_linear(50 * np.eye(3), state, None).findings[0]
    assert text.startswith("The whole batch: norm 28.87, usually 1.732.")


ACCUMULATED = {
    "inner": ("inner", 1, 3, "Step 1 is reproduced: norm ", ""),
    "outer": ("outer", 5, 3, "Step 5 is reproduced: norm ", ""),
    "no norm": ("outer", 4, 4, "Step 4 is reproduced: loss ", "no L2 norm of its own."),
    "one part": ("outer", 5, 5, "Step 5: recorded norm ", "such as weight decay)."),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_step_of_accumulated_gradients_is_compared_where_it_has_a_norm(name):
    """A history inside of MultiSteps has rows of whole steps only."""
    place, step, first, start, end = ACCUMULATED[name]
    clip = optclip.clip_by_global_norm(1.0)
    inner = optclip.with_history(clip) if place == "inner" else clip
    tx = optax.MultiSteps(inner, 3).gradient_transformation()
    tx = optclip.with_history(tx) if place == "outer" else tx
    state = tx.init(jnp.ones(3))
    x = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    for each in x:
        loss = jnp.mean(linear(jnp.ones(3), each))
        _, state = tx.update(jnp.mean(each, 0), state, jnp.ones(3), value=loss)
    last = 5 if name == "no norm" else 6
    text = explain_linear(x[first:last].reshape(-1, 3), state, step).findings[0]
    assert text.startswith(start)
    assert text.endswith(end)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_step_on_mesh_is_reproduced_in_parts(dtype):
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,))
    split = functools.partial(jax.device_put, device=NamedSharding(mesh, P("i")))
    run = trained(optimizer("leaves"), dtype=dtype, put=split)
    for i in (5, BAD):
        found = explained(run, i, step=i, microbatch_size=5)
        assert found.findings[0].startswith(f"Step {i} is reproduced: loss ")


def test_other_parameters_are_told():
    before, state = sound()
    found = explained(([*before[5:]], state), CHANGED, step=CHANGED)
    assert found.findings[0].startswith(f"Step {CHANGED}: recorded norm ")
    assert "Its loss differs too: recorded " in found.findings[0]
    assert len(found.findings) == 1
    history = optclip.history(state)
    history["loss"], norms = history["loss"] * 1.01, history["skip/norm"]
    found = explained((before, history), CHANGED, step=CHANGED)
    assert found.findings[0].startswith(f"Step {CHANGED} is reproduced: norm ")
    found = explained(
        (before, history | {"skip/norm": norms * 1.01}), CHANGED, step=CHANGED
    )
    assert found.findings[0].startswith(f"Step {CHANGED}: recorded loss ")
    assert "Its norm is close: recorded " in found.findings[0]
    assert not found.reproduced


OTHER_NORMS = {
    "inf": lambda record: optclip.clip_by(9.0, norm="inf", over="tree", record=record),
    "rms": lambda record: optclip.clip_by(9.0, norm="rms", over="tree", record=record),
    "of updates": lambda record: optax.chain(
        optax.scale_by_adam(), optclip.clip_by_global_norm(9.0, record=record)
    ),
}


@pytest.mark.parametrize("record", [True, "leaves"])
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_norm_than_of_gradient_does_not_blame_hardware(name, record):
    tx = optax.chain(OTHER_NORMS[name](record), optax.sgd(0.1))
    found = explained(trained(optclip.with_history(tx, steps=STEPS)), 5, step=5)
    (text,) = found.findings
    is_known = record == "leaves" and name != "of updates"
    assert found.reproduced == is_known
    assert ("is reproduced: loss" in text) == is_known
    hedged = "Look at hardware or random seeds, unless the recorded norm is not the L2"
    assert (hedged in text) != is_known


FAULTS = {"applied": jnp.inf, "skipped": 5.0, "lost by a restart": jnp.inf}


@pytest.mark.parametrize("name", FAULTS)
def test_step_after_fault_names_step_of_fault(name):
    """Unless the step of the fault was not applied."""
    run = trained(optimizer(max_norm=FAULTS[name]), CHANGES["bit 30"])
    sound_before, history = sound()[0], optclip.history(run[1])
    if "restart" in name:
        again = optclip.history(sound()[1])
        history = {k: [*x, *again[k][CHANGED - 10 :]] for k, x in history.items()}
    step = CHANGED + 3
    found = explained((sound_before[5:], history), step, step=step)
    named = [x for x in found.findings if x.startswith(f"Step {CHANGED} has norm ")]
    assert len(named) == (name == "applied")


def test_unknown_rows_are_told():
    before, _ = sound()
    with pytest.raises(ValueError, match="from 5 to 89, got 2 .* a log may have"):
        explained(sound(), 2, step=2)
    with pytest.raises(ValueError, match="`step` needs `history`"):
        optclip.explain(losses, before[2], *batch_of(2), step=2)
