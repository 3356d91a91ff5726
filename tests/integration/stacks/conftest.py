"""Isolate the libraries from the user's settings, which they read at import."""

import os
import tempfile

HOME = tempfile.mkdtemp(prefix="optclip-stacks-")
os.environ |= {
    "KERAS_BACKEND": "jax",
    "KERAS_HOME": os.path.join(HOME, "keras"),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Sends neither runs nor error reports.
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONFIG_DIR": os.path.join(HOME, "wandb"),
    "WANDB_CACHE_DIR": os.path.join(HOME, "wandb"),
    "WANDB_DATA_DIR": os.path.join(HOME, "wandb"),
}
