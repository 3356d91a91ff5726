"""Set the threshold: a number, a schedule, or a rule that learns from norms.

A rule is a frozen object with `init(norm)` and `update(seen, memory)`, without
`__call__` (optax.inject_hyperparams takes any callable for a schedule). What it knows
it keeps in `memory`, a pytree of arrays of fixed shapes. A norm that is NaN or inf
never enters a memory: if one is, a rule learns nothing from the step, of other leaves
neither, and its warm-up waits. A tree of rules, one per leaf, keeps the leaves apart.

==================== ===================================== =============================
rule                 threshold                             published as
==================== ===================================== =============================
`constant`           a number
`schedule`           an optax schedule of the step
`relative_to_params` a fraction of the parameters' norm       AGC
`previous_norm`      scales by the norm of the step before
`quantile`           a quantile of the last norms          AutoClip
`mean_plus_std`      mean + k deviations of the last norms Levanter
`zscore`             the same of a running mean            ZClip
`ema`                a multiple of the running norm        AdaGC, OLMo, AGGC
`mean_over_rms`      how steady the norms are              Stable-SPAM's AdaGN
`second_moment`      a multiple of each element's RMS      SPAM
`ema_of_max`         the running maximum of each leaf      Stable-SPAM's AdaClip
`moment`             each element's running power mean     ACClip
`of_gradients`       a rule that looks before an optimizer ACClip
==================== ===================================== =============================
"""

from optclip.thresholds._bounds import Bounds as Bounds
from optclip.thresholds._bounds import bounds as bounds
from optclip.thresholds._element_rules import ema_of_max as ema_of_max
from optclip.thresholds._element_rules import moment as moment
from optclip.thresholds._element_rules import second_moment as second_moment
from optclip.thresholds._ema import ema as ema
from optclip.thresholds._fixed import constant as constant
from optclip.thresholds._fixed import schedule as schedule
from optclip.thresholds._mean_over_rms import mean_over_rms as mean_over_rms
from optclip.thresholds._mean_plus_std import mean_plus_std as mean_plus_std
from optclip.thresholds._of_gradients import of_gradients as of_gradients
from optclip.thresholds._previous_norm import previous_norm as previous_norm
from optclip.thresholds._quantile import quantile as quantile
from optclip.thresholds._relative_to_params import (
    relative_to_params as relative_to_params,
)
from optclip.thresholds._rule import Rule as Rule
from optclip.thresholds._rule import Seen as Seen
from optclip.thresholds._rule import Threshold as Threshold
from optclip.thresholds._rule import ThresholdTree as ThresholdTree
from optclip.thresholds._zscore import zscore as zscore

__all__ = [
    "Bounds",
    "Rule",
    "Seen",
    "bounds",
    "constant",
    "ema",
    "ema_of_max",
    "mean_over_rms",
    "mean_plus_std",
    "moment",
    "of_gradients",
    "previous_norm",
    "quantile",
    "relative_to_params",
    "schedule",
    "second_moment",
    "zscore",
]
