"""Clip in a Keras optimizer with an optclip transformation, and read its state."""

from __future__ import annotations

import functools
import uuid
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._arrays import _validate
from .._arrays._types import PyTree
from .._monitor import metrics
from .._wrappers import transformation
from ._held_clip import HeldClip
from ._learned import check_saved, encoded
from ._library import keras

# The subclasses are made at run time, since importing optclip must not import Keras.
Base: Any = Any if TYPE_CHECKING else object

# The transformations of configurations, by the key in them: a configuration is JSON,
# which cannot hold the functions of a transformation.
_CLIPS: dict[str, optax.GradientTransformationExtraArgs] = {}

# Saved in the optimizer's configuration, which Keras prints if it cannot load it.
_HINT = (
    "model = keras.saving.load_model(path, compile=False);"
    " model.compile(optclip.keras.clipped(optimizer, clip), ...);"
    " model.optimizer.build(model.trainable_variables); model.load_weights(path)"
)

# The key of the description of the thresholds in a file, beside the variables' numbers.
_LEARNED = "optclip"


def clipped(optimizer: Any, clip: optax.GradientTransformation) -> Any:
    """Build a Keras optimizer that clips gradients with an optclip transformation.

    Clips after loss unscaling and gradient accumulation, where Keras applies its own
    `global_clipnorm`. Gradients and parameters have the paths of the Keras variables,
    for `by_path` and metrics. The clipping state is stored in variables of the
    optimizer, so that Keras saves it. Copies keep `clip`: `from_config`, `copy` and
    `pickle` of the optimizer, which start its state anew, and a model that the same
    process pickles, or saves and loads.

    Another process reads no pickle, and there `keras.saving.load_model(path)` raises
    "Could not locate class 'ClippedAdam'". Load the model with `compile=False`, compile
    it with the same optimizer and clip, call
    `model.optimizer.build(model.trainable_variables)`, and load the state with
    `model.load_weights(path)`. It raises if the saved thresholds have learned from
    other norms, or with another kind of rule.

    Example::

        clip = optclip.clip_by_global_norm(optclip.thresholds.quantile(0.9))
        optimizer = optclip.keras.clipped(keras.optimizers.Adam(1e-2), clip)
        model.compile(optimizer, loss="mse")

    Args:
      optimizer: A Keras optimizer that has not been built. It is not changed.
      clip: The transformation that clips the gradients: not an optax optimizer, which
        would negate them, and not `skip` or `constrain`.

    Returns:
      An optimizer of a subclass of the type of `optimizer`, with the same settings.

    Raises:
      ImportError: Keras is not installed.
      TypeError: `optimizer` is no single Keras optimizer, or clips by code of its own.
      ValueError: `optimizer` has `clipnorm`, `global_clipnorm` or `clipvalue`, has been
        built, or has settings that Keras does not copy; or the backend is not JAX. In
        `build`, which `fit` calls: `clip` does more than clip gradients.
      RuntimeError: Keras lacks the private method `Optimizer._clip_gradients`, which
        this optimizer overrides; or, in a step, has not called it.
    """
    advice = "Pass one that clips, such as optclip.clip_by_global_norm(1.0)."
    clip = transformation("clip", clip, advice)
    _check(optimizer)
    kind = _class_of(type(optimizer))
    result = super(Clipping, kind).from_config(optimizer.get_config())
    if lost := sorted(vars(optimizer).keys() - vars(result).keys()):
        raise ValueError(
            f"`optimizer` must have only settings of its get_config(), got also {lost}."
            " Call methods such as exclude_from_weight_decay on the clipped optimizer."
        )
    result.optclip_held = HeldClip(clip, uuid.uuid4().hex)
    return result


# Keras's own clipping, with the same clipping here.
_OWN = {
    "clipnorm": "clip_by_norm",
    "global_clipnorm": "clip_by_global_norm",
    "clipvalue": "clip_by_value",
}


def _check(optimizer: Any) -> None:
    kind = type(optimizer)
    wanted = "an unbuilt Keras optimizer without clipping of its own"

    def require(
        is_right: bool, advice: str, error: type[Exception] = TypeError
    ) -> None:
        _validate.require("optimizer", optimizer, is_right, wanted, advice, error)

    fix = "Pass one, such as keras.optimizers.Adam(1e-3)."
    # Before the import of Keras, which another mistake does not need.
    require(hasattr(optimizer, "get_config"), fix)
    base = keras().optimizers.Optimizer
    require(isinstance(optimizer, base), fix)
    is_ours = isinstance(optimizer, Clipping)
    require(not is_ours, "Join both clippings: optax.chain(first, second).")
    is_outer = hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")
    require(not is_outer, "Clip the optimizers inside it, and pass them to it.")
    advice = f"{kind.__name__} overrides _clip_gradients; pass its base class."
    require(kind._clip_gradients is base._clip_gradients, advice)
    advice = "It has been built; clip before compile or build."
    require(not optimizer.built, advice, ValueError)
    for name, ours in _OWN.items():
        limit = getattr(optimizer, name)
        advice = (
            f"Remove {name}={limit}, which would not be applied;"
            f" optclip.{ours}({limit}) clips the same."
        )
        require(limit is None, advice, ValueError)


class Clipping(Base):
    """Clip the gradients of the Keras optimizer that follows in the base classes."""

    def build(self, variables: Any) -> None:
        if not self.built:
            # Before Keras notes that the optimizer is built, since `init` may raise.
            state = self.optclip_held.init(variables)
            super().build(variables)
            self.optclip_held.build(self, state)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if grads and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        held = self.optclip_held
        held.expect(grads, trainable_variables)
        super().apply(grads, trainable_variables)
        if held.pending:
            raise RuntimeError(
                "Keras has not called Optimizer._clip_gradients, which optclip.keras"
                f" overrides, so the step of {self.keras_class.__name__} was not"
                " clipped. Use another optimizer, or a custom training loop."
            )
        held.count(self.iterations)

    def _clip_gradients(self, grads: Any) -> Any:
        return self.optclip_held.clip(grads)

    def get_config(self) -> dict[str, Any]:
        held = self.optclip_held
        _CLIPS[held.key] = held.transformation
        # First, since Keras prints the whole if it cannot load it.
        return {"load_with": _HINT} | super().get_config() | {"clip": held.key}

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **options: Any) -> Any:
        if (key := config.get("clip")) not in _CLIPS:
            raise ValueError(
                f"The configuration of {cls.__name__} must have the key of a clip that"
                f" this process has built, got {key!r}: a file cannot hold functions."
                f" Continue with a saved model by: {_HINT}"
            )
        settings = {k: config[k] for k in config if k not in ("clip", "load_with")}
        result = super().from_config(settings, *args, **options)
        result.optclip_held = HeldClip(_CLIPS[key], key)
        return result

    def __reduce__(self) -> Any:
        # Keras pickles the class by its name, by which pickle cannot import this one.
        return _from_config, (self.keras_class, keras().optimizers.serialize(self))

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        store[_LEARNED] = encoded(self.optclip_held.learned)

    def load_own_variables(self, store: Any) -> None:
        keys = store.keys()
        saved = {key: store[key] for key in keys}
        learned = saved.pop(_LEARNED, None)
        if self.built and len(saved) != len(self.variables):
            # Keras would warn, and continue with a new state.
            raise ValueError(
                f"The saved optimizer must have {len(self.variables)} variables, as"
                f" this one, got {len(saved)}. Use the saved optimizer, and a clip with"
                " the saved scope, kind of rule and record=; numbers may differ."
            )
        if self.built:
            check_saved(learned, self.optclip_held.learned)
        super().load_own_variables(saved)


@functools.cache
def _class_of(kind: Any) -> Any:
    """Return the subclass of an optimizer class that clips."""
    names = {
        "__module__": "optclip.keras",
        "__doc__": f"Clip the gradients of {kind.__name__}.",
        "keras_class": kind,
    }
    result = type(f"Clipped{kind.__name__}", (Clipping, kind), names)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return keras().saving.register_keras_serializable("optclip", name)(result)


def _from_config(kind: Any, serialized: dict[str, Any]) -> Any:
    return _class_of(kind).from_config(serialized["config"])


def clip_state(model: Any) -> PyTree:
    """Read the clipping state of a Keras model, for `optclip.metrics` and others.

    In a callback of `model.fit` it reads the state of the last step, and waits for it.
    A custom `train_step` reads the state of its step in the scope of the new variables,
    `with keras.StatelessScope(zip(self.optimizer.variables, optimizer_variables)):`.

    Example::

        print(optclip.summary(optclip.keras.clip_state(model)))

    Args:
      model: A compiled model or an optimizer, with a clipped optimizer that may be
        inside a `LossScaleOptimizer`.

    Returns:
      A copy of the state of the transformation that `clipped` was called with.

    Raises:
      TypeError: There is no optimizer that `clipped` has returned.
      ValueError: The optimizer has not been built; or, in a `train_step`, the state
        of this step is not in scope.
    """
    optimizer = getattr(model, "optimizer", model)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    wanted = "a Keras model or optimizer with a clipped optimizer"
    advice = "Pass compile(...) the result of optclip.keras.clipped(optimizer, clip)."
    is_clipped = isinstance(optimizer, Clipping)
    _validate.require("model", model, is_clipped, wanted, advice, TypeError)
    advice = "Train it, or call optimizer.build(model.trainable_variables)."
    _validate.require("model", model, optimizer.built, f"{wanted} built", advice)
    held = optimizer.optclip_held
    leaves, is_traced = held.leaves(), isinstance(jnp.zeros(()), Tracer)
    size = len(held.variables)
    if len(leaves) < size and not is_traced and hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
        leaves = held.leaves()
        # In an uncompiled `train_step`, there is still none, or that of the step
        # before, from which Keras would continue.
        if leaves and held.steps > jnp.asarray(optimizer.iterations):
            leaves = []
    # The value of another step would become a constant of a compiled step.
    is_known = all(isinstance(x, Tracer) == is_traced for x in leaves)
    advice = (
        "In `train_step`, read it `with keras.StatelessScope(zip("
        "self.optimizer.variables, optimizer_variables)):` of the new variables, or"
        " pass `fit` the callback optclip.keras.log_metrics()."
    )
    is_known = is_known and len(leaves) == size
    _validate.require("model", model, is_known, f"{wanted} between steps", advice)
    # The next step of `model.fit` deletes the arrays of the variables.
    return jax.tree.map(jnp.copy, held.state(leaves))


def log_metrics() -> Any:
    """Build a Keras callback that adds the clipping metrics to the logs.

    At the end of an epoch, `history.history` and the callbacks that follow in the list
    get the keys of `optclip.metrics`, such as `clip/norm` of the last step and
    `clip/rate` of all steps. For more often, read `optclip.metrics(clip_state(model))`
    in a callback.

    Example::

        history = model.fit(x, y, callbacks=[optclip.keras.log_metrics()])
        history.history["clip/rate"]

    Returns:
      An instance of `keras.callbacks.Callback`.

    Raises:
      ImportError: Keras is not installed.
    """

    class LogMetrics(keras().callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            numbers = metrics(clip_state(self.model))
            logs.update({key: value.item() for key, value in numbers.items()})

    return LogMetrics()
