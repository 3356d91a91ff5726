"""Check an installation in an environment with only optclip and its dependencies."""

import importlib.metadata
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

import optclip

where = pathlib.Path(optclip.__file__)
assert pathlib.Path(sys.prefix) in where.parents, where
assert (where.parent / "py.typed").exists()
assert optclip.__version__ == importlib.metadata.version("optclip")

tx = optax.chain(optclip.clip_by_global_norm(1.0), optax.adamw(3e-4))
params = {"bias": jnp.zeros(1), "kernel": jnp.zeros((1, 1))}
grads = {"bias": jnp.array([3.0]), "kernel": jnp.array([[4.0]])}
updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
assert float(optclip.metrics(state)["clip/norm"]) == 5.0
assert optclip.summary(state).startswith("clip: norm 5, threshold 1,")

clipped, norm = optclip.functional.clip_by_global_norm(grads, 1.0)
assert abs(float(clipped["kernel"][0, 0]) - 0.8) < 1e-6

for name in optclip.recipes.__all__:
    getattr(optclip.recipes, name)

message = ""
try:
    optclip.plot.norms([optclip.metrics(state)])
except ImportError as error:
    message = str(error)
assert "pip install matplotlib" in message, "Matplotlib is installed."

print(optclip.__version__)
