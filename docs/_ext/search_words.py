"""Words that readers search for, and the section that the site's search puts first.

Sphinx finds pages that contain all words of a query, and ranks a word in any heading
of a page like one in its title. An index entry outranks both if it contains the query
and has at most twice its length. `tests/integration/site` runs such queries.
"""

from sphinx import addnodes
from sphinx.application import Sphinx

# The entries of the sections of each page; the anchor of the page itself is empty.
ENTRIES = {
    "benchmarks": {"": ["slow", "speed", "overhead"]},
    "choosing_a_method": {
        "": ["which method"],
        "fine-tuning": ["lora", "adapter", "fine-tuning"],
    },
    "choosing_a_threshold": {
        "": ["which threshold", "threshold"],
        "published-thresholds": ["max_norm value", "default threshold"],
    },
    "distributed_training": {
        "": ["sharding", "multiple gpus", "pmap", "shard_map"],
        "fsdp-and-tensor-parallel": ["fsdp", "tensor parallel"],
    },
    "faq": {
        "adam-normalizes-its-gradients-why-clip": ["adam"],
        "before-or-after-gradient-accumulation": ["gradient accumulation"],
        "where-in-the-chain-does-clipping-go": ["before or after optimizer"],
        "why-is-clip-rate-1": ["learning rate", "always clipped"],
        "why-is-the-logged-norm-above-my-threshold": ["norm above threshold"],
    },
    "integrations": {
        "flax-nnx": ["nnx"],
        "loggers": ["tensorboard", "wandb"],
        "clipping-in-keras-modelfit": ["model.fit"],
    },
    "loss_spikes": {
        "": ["loss spikes", "spikes", "diverge", "instability"],
        "update-norm": ["update norm"],
    },
    "methods": {
        "other-methods": [
            "dreamerv3",
            "gradientstabilizer",
            "dp-psac",
            "update floor",
            "clip21",
        ],
    },
    "migrating": {
        "pytorch": ["clip_grad_norm_", "pytorch"],
        "tensorflow-and-keras": ["clipnorm", "tensorflow"],
    },
    "monitoring_and_plots": {"": ["log gradient norm", "gradient norm", "dashboard"]},
    "muon_attention_singular_values": {"": ["muon"]},
    "nan_and_inf": {
        "": ["nan", "nan loss", "nan gradients", "inf", "overflow"],
        "mixed-precision": ["bfloat16", "float16"],
    },
    "private_training": {"": ["dp-sgd", "differential privacy"]},
    "production_runs": {
        "": ["checkpoint", "alerts"],
        "resume-from-a-checkpoint": ["resume checkpoint"],
        "rollback": ["rollback", "rewind"],
    },
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the entries as pages are read."""
    app.connect("doctree-read", add)
    return {"parallel_read_safe": True}


def add(app: Sphinx, document) -> None:
    """Add the entries of a page to the search, not to the general index."""
    for anchor, searches in ENTRIES.get(app.env.docname, {}).items():
        entries = [("single", words, anchor, "main", None) for words in searches]
        document.append(addnodes.index(entries=entries, inline=False))
