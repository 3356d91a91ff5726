"""Keras stays optional: what `optclip.keras` says without it, or with another one."""

import sys
import types

import optax
import pytest

import optclip

CLIP = optclip.clip_by_global_norm(1.0)


def library(backend="jax", hook=lambda self, grads: grads):
    """Return a module like Keras; its optimizers have `hook`, unless it is None."""
    hooks = {} if hook is None else {"_clip_gradients": hook}
    optimizers = types.SimpleNamespace(Optimizer=type("Optimizer", (), hooks))
    names = types.SimpleNamespace(backend=lambda: backend)
    return types.SimpleNamespace(
        backend=names, optimizers=optimizers, __version__="3.99"
    )


@pytest.mark.parametrize(
    ("keras", "error", "words"),
    [
        (
            None,
            ImportError,
            "requires Keras 3 .* pip install keras, and set KERAS_BACK",
        ),
        (library("torch"), ValueError, "'jax', got 'torch': set KERAS_BACKEND=jax bef"),
        (library(hook=None), RuntimeError, "Keras 3.99 has no .*_clip_gradients.grads"),
        (
            library(hook=lambda self: 0),
            RuntimeError,
            "which is private and which optcl",
        ),
    ],
)
def test_unusable_keras_raises_with_fix(monkeypatch, keras, error, words):
    monkeypatch.setitem(sys.modules, "keras", keras)
    optimizer = types.SimpleNamespace(get_config=dict)
    with pytest.raises(error, match=words):
        optclip.keras.clipped(optimizer, CLIP)
    with pytest.raises(error, match=words):
        optclip.keras.log_metrics()


def test_optimizer_of_another_library_raises_with_keras_optimizer(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", library())
    with pytest.raises(TypeError, match=r"such as keras\.optimizers\.Adam\(1e-3\)"):
        optclip.keras.clipped(optax.sgd(0.1), CLIP)
