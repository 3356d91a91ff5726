"""What the libraries read once, at import, kept from the user's own settings."""

import os
import tempfile

HOME = tempfile.mkdtemp(prefix="optclip-stacks-")
os.environ |= {
    "KERAS_BACKEND": "jax",
    "KERAS_HOME": os.path.join(HOME, "keras"),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Nothing is to be sent, be it a run or a report of an error.
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONFIG_DIR": os.path.join(HOME, "wandb"),
    "WANDB_CACHE_DIR": os.path.join(HOME, "wandb"),
    "WANDB_DATA_DIR": os.path.join(HOME, "wandb"),
}
