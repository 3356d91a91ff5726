"""Published clipping methods, each a single expression of optclip's parts.

Defaults are the authors', where they exist. "Adam" is `optax.scale_by_adam()`, followed
by the learning rate.

=============== =================================== ==================================
recipe          combination                         place in the chain
=============== =================================== ==================================
`agc`           units x the parameters' own norm    before the optimizer
`autoclip`      tree x quantile of 10,000 norms     before the optimizer
`zclip`         tree x running mean + z deviations  before the optimizer
`adagc`         leaves x running norm               before the optimizer
`aggc`          groups x running norm               before the optimizer
`mean_std_clip` tree x mean + k deviations          before the optimizer
`olmo_ratio`    leaves x running norm               before the optimizer
`auto_s`        tree x normalize                    before the optimizer
`sclip`         elements x smooth                   before the optimizer
`uclip`         any clipping with error feedback    before the optimizer
`spam`          elements x second moment, resets    replaces Adam
`stable_spam`   elements, then leaves, resets       replaces Adam
`acclip`        elements x mean modulus             replaces Adam
`spectra`       singular values x smooth cap        replaces Adam
`stable_adamw`  leaves x RMS of gradient over v     replaces Adam and weight decay
`clippy`        leaves x fraction of parameters     after the learning rate
`olmo_skip`     skip x mean + 6 deviations          around the whole optimizer
`axlearn_skip`  skip x 20 running norms             around the whole optimizer
`megatron_skip` skip x a fixed norm                 around the whole optimizer
=============== =================================== ==================================
"""

from ._recipes._gradient_clipping import (
    adagc,
    agc,
    aggc,
    auto_s,
    autoclip,
    mean_std_clip,
    olmo_ratio,
    sclip,
    zclip,
)
from ._recipes._optimizers import (
    acclip,
    clippy,
    spam,
    spectra,
    stable_adamw,
    stable_spam,
)
from ._recipes._skips import axlearn_skip, megatron_skip, olmo_skip
from ._wrappers._error_feedback import uclip

__all__ = [
    "acclip",
    "adagc",
    "agc",
    "aggc",
    "auto_s",
    "autoclip",
    "axlearn_skip",
    "clippy",
    "mean_std_clip",
    "megatron_skip",
    "olmo_ratio",
    "olmo_skip",
    "sclip",
    "spam",
    "spectra",
    "stable_adamw",
    "stable_spam",
    "uclip",
    "zclip",
]
