"""Train, save and load Keras models with `optclip.keras`, and compare constraints."""

import contextlib
import copy
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import distribution, optimizers

import optclip
from tests.integration.stacks import by_hand, page

FIXED = optclip.clip_by_global_norm(1.0)
# A memory and a record for each variable, under its name.
LEARNED = optclip.clip_by_norm(optclip.thresholds.quantile(0.5, 8), record="leaves")
X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X).sum(axis=1, keepdims=True)
# Keras calls np.array in a way that NumPy 2 has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def settings_restored():
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
    distribution.set_distribution(None)


def make_model(optimizer, kind=keras.Sequential, **options):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    layers = [layers.Dense(8, activation="relu"), layers.Dense(8), layers.Dense(1)]
    model = kind([keras.Input((8,)), *layers])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def fit(model, epochs=3, **options):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, epochs=epochs, **options).history


def state_of(model):
    """Return the optimizer's variables, the clipping state last."""
    return [v.numpy() for v in model.optimizer.variables]


def read(model):
    return optclip.metrics(optclip.keras.clip_state(model))


def test_block_of_page_clips_some_steps():
    names = page.names("Clipping in Keras `model.fit`")
    state = optclip.keras.clip_state(names["model"])
    by_hand.check_trained(names["losses"], state)


def test_block_of_custom_loop_takes_step_of_optimizer():
    names = dict(page.names("Keras 3 on JAX"))
    before, others, x, y = (names[name] for name in ("params", "others", "x", "y"))
    names = page.run("Keras optimizer in a custom loop", names)
    grads, _ = jax.grad(names["loss_of"], has_aux=True)(before, others, x, y)
    variables = [keras.Variable(value) for value in before]
    optimizers.AdamW(1e-2, global_clipnorm=1.0).apply(grads, variables)
    for g, variable, new in zip(grads, variables, names["params"], strict=True):
        # The gradient of a bias before the batch norm is a rounding error.
        at = np.abs(g) > 1e-5
        np.testing.assert_allclose(variable.numpy()[at], new[at], rtol=0, atol=1e-5)
    assert names["logged"]["clip/rate"] == 1


@pytest.mark.parametrize(
    ("policy", "of_optimizer", "of_compile"),
    [
        ("float32", {}, {"steps_per_execution": 3}),
        ("float32", {}, {"run_eagerly": True, "steps_per_execution": 2}),
        ("float32", {"gradient_accumulation_steps": 2}, {}),
        ("mixed_float16", {}, {}),
    ],
    ids=["steps_per_execution", "eager", "accumulation", "mixed_float16"],
)
def test_fit_of_clipped_optimizer_equals_global_clipnorm(
    policy, of_optimizer, of_compile
):
    keras.config.set_dtype_policy(policy)
    adam = optimizers.Adam(0.05, global_clipnorm=1.0, **of_optimizer)
    expected = fit(make_model(adam, **of_compile))["loss"]
    adam = optimizers.Adam(0.05, **of_optimizer)
    model = make_model(optclip.keras.clipped(adam, FIXED), **of_compile)
    losses = fit(model)["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    logged = read(model)
    assert logged["clip/rate"] > 0.5
    # Neither the steps between updates nor those whose loss overflows are recorded.
    steps = {"accumulation": 6, "mixed_float16": 11}
    case = "accumulation" if of_optimizer else policy
    assert logged["clip/steps"] == steps.get(case, 12)


OPTIMIZERS = [
    name
    for name, kind in vars(optimizers).items()
    if isinstance(kind, type)
    and issubclass(kind, optimizers.Optimizer)
    and name not in ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")
]


def by_json(optimizer):
    return optimizers.get(json.loads(json.dumps(optimizers.serialize(optimizer))))


def by_pickle(original):
    return pickle.loads(pickle.dumps(original))


def by_config(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_of_keras_and_copies_clip_as_global_clipnorm(name):
    kind = getattr(optimizers, name)
    results = []
    clipped = optclip.keras.clipped(kind(0.1), FIXED)
    copies = [make(clipped) for make in (by_config, by_json, by_pickle, copy.deepcopy)]
    for optimizer in (kind(0.1, global_clipnorm=1.0), clipped, *copies):
        variables = [keras.Variable(np.ones((2, 2), np.float32)) for _ in range(2)]
        for size in (3.0, 0.1):
            optimizer.apply([size * jnp.arange(4.0).reshape(2, 2)] * 2, variables)
        results.append([v.numpy() for v in variables])
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)
    assert [read(each)["clip/clipped"] for each in (clipped, *copies)] == [1] * 5


def test_copies_of_optimizers_with_equal_names_keep_their_classes():
    class SGD(optimizers.SGD):
        pass

    for kind in (optimizers.SGD, SGD, optimizers.SGD):
        clipped = optclip.keras.clipped(kind(0.1), FIXED)
        for make_copy in (by_json, by_config, copy.deepcopy):
            assert type(make_copy(clipped)) is type(clipped)


def by_file(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model.keras"))
        return keras.saving.load_model(Path(folder, "model.keras"))


def by_compile_config(model):
    result = keras.models.clone_model(model)
    result.compile_from_config(model.get_compile_config())
    result.set_weights(model.get_weights())
    pairs = zip(result.optimizer.variables, model.optimizer.variables, strict=True)
    for new, old in pairs:
        new.assign(old.numpy())
    return result


@pytest.mark.parametrize(
    ("make_copy", "wrap"),
    [
        (copy.deepcopy, lambda x: x),
        (by_pickle, optimizers.LossScaleOptimizer),
        (by_file, lambda x: x),
        (by_compile_config, optimizers.LossScaleOptimizer),
    ],
)
def test_copy_of_model_continues_with_clip(make_copy, wrap):
    model = make_model(wrap(optclip.keras.clipped(optimizers.Adam(0.05), LEARNED)))
    fit(model, epochs=1)
    other = make_copy(model)
    assert fit(model, epochs=1) == fit(other, epochs=1)
    for a, b in zip(state_of(model), state_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


LOAD = """
import sys, keras, numpy as np, optclip
from tests.integration.stacks import test_keras as t
def check_loading_fails():
    try:
        keras.saving.load_model(sys.argv[1])
    except Exception as error:
        assert "load_model(path, compile=False); model.compile(optclip.keras" in str(error)
        return type(error)
assert check_loading_fails() is TypeError  # by Keras, which prints the configuration
adam = optclip.keras.clipped(keras.optimizers.Adam(0.05), t.LEARNED)
assert check_loading_fails() is ValueError
model = keras.saving.load_model(sys.argv[1], compile=False)
model.compile(adam, loss="mse")
model.optimizer.build(model.trainable_variables)
model.load_weights(sys.argv[1])
states = [t.state_of(model)]
losses = t.fit(model)["loss"]
np.savez(sys.argv[2], *states[0], *t.state_of(model), losses)
"""


def test_new_process_restores_model_and_continues(tmp_path):
    """It numbers the layers from 0, and this process from a higher number."""
    model = make_model(optclip.keras.clipped(optimizers.Adam(0.05), LEARNED))
    fit(model)
    model.save(tmp_path / "model.keras")
    paths = [tmp_path / "model.keras", tmp_path / "states.npz"]
    subprocess.run(
        [sys.executable, "-c", LOAD, *paths], check=True, cwd=Path(__file__).parents[3]
    )
    expected = [*state_of(model), fit(model)["loss"]]
    expected[-1:-1] = state_of(model)
    with np.load(paths[1]) as saved:
        for a, b in zip(saved.values(), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert 0 < min(v for k, v in read(model).items() if "clip/rate" in k) < 1


def test_weights_load_into_layers_with_other_numbers(tmp_path):
    """The names `dense_9` and `dense_10` are sorted in the other order."""
    keras.backend.clear_session()
    for _ in range(3):
        model = make_model(optclip.keras.clipped(optimizers.Adam(0.05), LEARNED))
    model = make_model(optclip.keras.clipped(optimizers.Adam(0.05), LEARNED))
    assert [layer.name for layer in model.layers] == ["dense_9", "dense_10", "dense_11"]
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    keras.backend.clear_session()
    other = built_model(LEARNED, optimizers.Adam)
    other.load_weights(tmp_path / "model.weights.h5")
    logged, restored = read(model), read(other)
    for a, b in zip(model.trainable_variables, other.trainable_variables, strict=True):
        norm = f"clip/norm/{a.path}", f"clip/norm/{b.path}"
        assert a.path != b.path
        assert logged[norm[0]] == restored[norm[1]] > 0
    assert fit(model)["loss"] == fit(other)["loss"]


def test_loading_with_another_clip_raises(tmp_path):
    built_model(LEARNED).save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(
        ValueError, match=r"have 8 var.*got 42.* scope, kind of rule and"
    ):
        built_model(FIXED).load_weights(tmp_path / "model.weights.h5")


RULE = optclip.thresholds.quantile(0.5, 8)


def groups(of_kernels, of_biases):
    labels = {True: of_kernels, False: of_biases}
    scope = optclip.groups(optclip.by_path(lambda path: labels["kernel" in path]))
    return optclip.clip_by(RULE, over=scope)


def built_model(clip, kind=optimizers.SGD):
    model = make_model(optclip.keras.clipped(kind(0.05), clip))
    model.optimizer.build(model.trainable_variables)
    return model


BY_NORM = optclip.clip_by_norm(RULE)
BY_RMS = optclip.clip_by(RULE, over="leaf", norm="rms")
MEAN = optclip.clip_by_norm(optclip.thresholds.mean_plus_std(3.0, 8))
TWO = optax.chain(BY_NORM, optclip.clip_by(RULE, over="leaf", norm="rms", name="rms"))
EXCHANGED = optax.chain(BY_RMS, optclip.clip_by_norm(RULE, name="norm"))
OTHERS = {
    "norm": (BY_NORM, BY_RMS, r"norm 'Norm 2 0.5 of EachLeaf', .*got 'Norm 2 0 of"),
    "rule": (BY_NORM, MEAN, r"rules \['MeanPlusStd'\], .*got \['Quantile'\]"),
    "labels": (groups("a", "b"), groups("b", "a"), r"\[\[1, 3, 5\], .*got \[\[0, 2, 4"),
    "order": (TWO, EXCHANGED, "norm 'Norm 2 0.5 of EachLeaf'"),
}


@pytest.mark.parametrize(("saved", "clip", "words"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_thresholds_learned_otherwise_do_not_load(tmp_path, suffix, saved, clip, words):
    """All shapes are equal, so that Keras itself would load them."""
    path, model = tmp_path / f"model{suffix}", built_model(saved)
    fit(model, epochs=1)
    save = model.save if suffix == ".keras" else model.save_weights
    save(path)
    other = built_model(clip)
    shapes = [[x.shape for x in state_of(each)] for each in (model, other)]
    assert shapes[0] == shapes[1]
    with pytest.raises(
        ValueError, match=f"learned with the .*{words}.*before `compile"
    ):
        other.load_weights(path)
    same = built_model(saved)
    same.load_weights(path)
    np.testing.assert_array_equal(state_of(same)[-1], state_of(model)[-1])
    # The remedy in the message.
    layers_only = keras.Sequential([keras.layers.Dense(n) for n in (8, 8, 1)])
    layers_only.build((None, 8))
    layers_only.load_weights(path)
    for a, b in zip(layers_only.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_callbacks_check_thresholds_of_saved_model(tmp_path, policy):
    keras.config.set_dtype_policy(policy)
    path = tmp_path / "model.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)

    def backup():
        # Kept after the training, as after a crash.
        return keras.callbacks.BackupAndRestore(
            tmp_path / "backup", delete_checkpoint=False
        )

    model = built_model(BY_NORM)
    fit(model, callbacks=[checkpoint, backup()])
    same, other = built_model(BY_NORM), built_model(BY_RMS)
    same.load_weights(path)
    with pytest.raises(ValueError, match=r"learned with the norm"):
        other.load_weights(path)
    with pytest.raises(ValueError, match=r"learned with the norm"):
        fit(built_model(BY_RMS), epochs=4, callbacks=[backup()])
    assert len(fit(built_model(BY_NORM), epochs=4, callbacks=[backup()])["loss"]) == 1
    for a, b in zip(state_of(same), state_of(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_numbers_of_thresholds_load(tmp_path):
    path, model = tmp_path / "model.weights.h5", built_model(BY_NORM)
    fit(model, epochs=1)
    model.save_weights(path)
    rule = optclip.thresholds.scaled(optclip.thresholds.quantile(0.9, 8), 2.0)
    other = built_model(optclip.clip_by_norm(rule, strict=True))
    other.load_weights(path)
    assert read(other)["clip/steps"] == 4


def model_parallel():
    devices = distribution.list_devices()
    layout = distribution.LayoutMap(
        distribution.DeviceMesh((2, 4), ["batch", "model"], devices)
    )
    layout[".*kernel"] = ("model", None)
    return distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


@pytest.mark.parametrize("make", [distribution.DataParallel, model_parallel])
def test_parallel_training_equals_one_device(make):
    one = make_model(optclip.keras.clipped(optimizers.Adam(0.05), LEARNED))
    expected = fit(one)["loss"]
    distribution.set_distribution(make())
    model = make_model(optclip.keras.clipped(optimizers.Adam(0.05), LEARNED))
    losses = fit(model)["loss"]
    assert len(model.optimizer.variables[-1].value.sharding.device_set) == 8
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for a, b in zip(state_of(model), state_of(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_metrics_of_trainable_layers_are_logged_by_path():
    model = make_model(optclip.keras.clipped(optimizers.SGD(0.05), LEARNED))
    model.layers[0].trainable = False
    model.compile(model.optimizer, loss="mse")
    history = fit(model, callbacks=[optclip.keras.log_metrics()])
    norms = {key for key in history if key.startswith("clip/norm/")}
    assert norms == {f"clip/norm/{v.path}" for v in model.trainable_variables}
    assert len(norms) == 4
    assert history["clip/steps"] == [4, 8, 12]


class Logged(keras.Sequential):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        with self.scope(zip(self.optimizer.variables, state[2], strict=True)):
            return logs | read(self), state


class Compared(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        logged = read(self.model)
        assert logged["clip/steps"] == self.model.optimizer.iterations
        for key, value in logged.items():
            np.testing.assert_array_equal(logs[key], value)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": False}])
def test_train_step_reads_state_of_its_step_in_scope_or_raises(options):
    fix = r"with keras.StatelessScope\(zip.*log_metrics"
    new, model = (
        make_model(
            optclip.keras.clipped(optimizers.Adam(0.05), FIXED), Logged, **options
        )
        for _ in range(2)
    )
    new.scope = contextlib.nullcontext
    with pytest.raises(ValueError, match=fix):
        fit(new)
    model.scope = keras.StatelessScope
    fit(model, epochs=1, callbacks=[Compared()])
    assert model.train_on_batch(X, Y, return_dict=True)["clip/steps"] == 5
    model.scope = contextlib.nullcontext
    model.make_train_function(force=True)
    if not options:
        with pytest.raises(ValueError, match=fix):
            model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match=fix):
        fit(model)


def test_parameters_are_passed_by_path():
    is_kernel = optclip.by_path(lambda path: path.endswith("kernel"))
    clip = optclip.recipes.agc(0.01, mask=is_kernel)
    model = make_model(optclip.keras.clipped(optimizers.SGD(0.0), clip))
    fit(model, epochs=1)
    largest = max(v for k, v in read(model).items() if "threshold" in k)
    assert 0 < largest < 0.05


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_missing_gradients_and_equal_names_share_norm():
    def variable(name):
        return keras.Variable(np.zeros(2, np.float32), name=name)

    variables = [variable("a"), variable("b"), variable("a")]
    clip = optclip.clip_by_global_norm(5.0, record="leaves")
    optimizer = optclip.keras.clipped(optimizers.SGD(1.0), clip)
    optimizer.apply([jnp.array([6.0, 0.0]), None, jnp.array([0.0, 8.0])], variables)
    stepped = [v.numpy().tolist() for v in variables]
    assert stepped == [[-3, 0], [0, 0], [0, -4]]
    optimizer.apply([jnp.array([6.0, 8.0])], variables[2:])
    assert variables[2].numpy().tolist() == [-3, -8]
    logged = read(optimizer)
    names = ("a", "b", "a_1")
    assert [logged[f"clip/leaf_norm/{name}"] for name in names] == [0, 0, 10]


class Pasted(optimizers.SGD):
    def _clip_gradients(self, grads):
        return grads


class Replaced(optimizers.SGD):
    def _backend_apply_gradients(self, grads, trainable_variables):
        pass


def built():
    optimizer = optimizers.SGD(0.1)
    optimizer.build([])
    return optimizer


def excluded():
    optimizer = optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: optimizers.Adam(clipnorm=1.0), ValueError, r"Remove clipnorm=1.0.*clip_by_norm"),
        (lambda: optimizers.Adam(global_clipnorm=1.0), ValueError, "Remove global_clipnorm=1.0"),
        (lambda: optimizers.Adam(clipvalue=0.5), ValueError, r"optclip.clip_by_value\(0.5\) cl"),
        (built, ValueError, "It has been built; clip before compile or build"),
        (excluded, ValueError, "exclude_from_weight_decay on the clipped optimizer"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.SGD()), TypeError, "Clip the optimizers inside"),
        (lambda: optclip.keras.clipped(optimizers.SGD(), FIXED), TypeError, "optax.chain.first"),
        (Pasted, TypeError, "Pasted overrides _clip_gradients; pass its base class"),
        (lambda: optimizers.Adam, TypeError, r"must be an unbuilt Keras .* such as keras.opt"),
    ],
)  # fmt: skip
def test_optimizer_that_cannot_be_clipped_raises_with_fix(make, error, words):
    with pytest.raises(error, match=words):
        optclip.keras.clipped(make(), FIXED)


SGD_01 = optax.chain(FIXED, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        (SGD_01, r"not negate .* Pass only the clipping, .*clip_by_global_norm"),
        (optax.adam(optax.linear_schedule(0.0, 0.1, 9)), "does not negate the gradients"),
        (optax.adamw(0.1, weight_decay=1e3), "does not negate the gradients"),
        (optclip.constrain(optax.identity(), FIXED), "not limit parameters.*MaxNorm"),
        (optax.chain(optclip.skip(FIXED)), r'not skip steps.*nonfinite="zero"'),
        (optax.apply_if_finite(FIXED, 3), "does not skip steps, got Apply"),
    ],
)  # fmt: skip
def test_transformation_that_does_more_than_clip_raises_with_fix(clip, words):
    optimizer = optclip.keras.clipped(optimizers.SGD(0.1), clip)
    variables = [keras.Variable(np.ones((2, 3), np.float32))]
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            optimizer.apply([jnp.ones((2, 3))], variables)
    np.testing.assert_array_equal(variables[0].numpy(), 1)


@pytest.mark.parametrize(
    "clip",
    [
        optclip.clip_by_global_norm(1e-3, response="drop"),
        optclip.clip_by_norm(optclip.thresholds.quantile(0.5, 8)),
        optclip.clip_by_value(lower=0.0, upper=0.1),
        optclip.recipes.uclip(FIXED),
        optax.chain(FIXED, optax.centralize()),
        optclip.recipes.agc(0.01),
        optax.set_to_zero(),
    ],
)
def test_clipping_of_each_kind_is_accepted(clip):
    optimizer = optclip.keras.clipped(optimizers.SGD(0.1), clip)
    optimizer.apply([jnp.ones((2, 3))], [keras.Variable(np.ones((2, 3), np.float32))])


def test_step_that_was_not_clipped_raises():
    optimizer = optclip.keras.clipped(Replaced(), FIXED)
    with pytest.raises(RuntimeError, match="the step of Replaced was not clipped"):
        optimizer.apply([jnp.ones(2)], [keras.Variable(np.ones(2, np.float32))])


def test_clip_state_of_unusable_model_raises_with_fix():
    with pytest.raises(TypeError, match=r"result of optclip.keras.clipped\(optimizer"):
        optclip.keras.clip_state(make_model(optimizers.SGD()))
    with pytest.raises(ValueError, match="call optimizer.build.model.trainable_var"):
        optclip.keras.clip_state(
            make_model(optclip.keras.clipped(optimizers.SGD(), FIXED))
        )


def test_keras_compile_rejects_optax():
    """The reason for `clipped`; shorten the page when this test fails."""
    with pytest.raises(ValueError, match="Could not interpret optimizer"):
        make_model(optax.sgd(0.1))


# Constrained parameters equal those of Keras's constraints.

BAND = optclip.responses.band(0.5)


def softly(norm, high, low=1.0, rate=0.3):
    norm = jnp.maximum(norm, 1e-30)
    return 1 - rate + rate * jnp.clip(norm, low, high) / norm


def by_norm(limit, response="hard"):
    return optclip.clip_by(limit, over=optclip.axes(0), response=response)


C = keras.constraints
CONSTRAINTS = {
    "MaxNorm": (C.MaxNorm(2, axis=0), by_norm(2.0)),
    "UnitNorm": (C.UnitNorm(axis=0), by_norm(1.0, "normalize")),
    "MinMaxNorm": (C.MinMaxNorm(1, 2, axis=0), by_norm(2.0, BAND)),
    "rate": (C.MinMaxNorm(1, 2, rate=0.3, axis=0), by_norm(2.0, softly)),
    "NonNeg": (C.NonNeg(), optclip.clip_by_value(lower=0.0, upper=np.inf)),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constrain_equals_constraint_of_keras(name):
    """Norms of columns are at least 1: Keras adds 1e-7 to each."""
    theirs, clip = CONSTRAINTS[name]
    rng = np.random.default_rng(4)
    params = rng.normal(size=(8, 6)).astype(np.float32)
    params *= np.float32([0.5, 0.6, 1, 1, 2, 3])
    grads = rng.normal(size=(8, 6)).astype(np.float32)
    tx = optclip.constrain(optax.sgd(0.01), clip)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    plain = params - np.float32(0.01) * grads
    assert np.all(np.linalg.norm(plain, axis=0) >= 1)
    expected = np.asarray(theirs(jnp.asarray(plain)))
    assert np.max(np.abs(expected - plain)) > 1e-2
    np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-6)
