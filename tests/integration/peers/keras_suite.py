"""The gradient clipping of Keras optimizers, by optclip."""

import os
import tempfile

# Read at import. Keras must not use the user's settings.
os.environ["KERAS_BACKEND"] = "jax"
os.environ["KERAS_HOME"] = os.path.join(tempfile.gettempdir(), "optclip-peers-keras")

from keras.src.optimizers import base_optimizer

from optclip import functional

FILES = ("keras/src/optimizers/*_test.py",)
# The other tests only construct optimizers, or need the TensorFlow backend.
SELECT = "clip and not args and not indexed_slices"
PASSED = 31
KNOWN = {}


def _clip_gradients(self, grads):
    if self.clipnorm:
        return functional.clip_by_norm(grads, self.clipnorm)
    if self.global_clipnorm:
        return functional.clip_by_global_norm(grads, self.global_clipnorm)[0]
    if self.clipvalue:
        return functional.clip_by_value(grads, self.clipvalue)
    return grads


OWNERS = ((base_optimizer.BaseOptimizer, _clip_gradients),)
