"""Set the threshold: a number, a schedule, or a rule that learns from norms.

A rule is a frozen object with `init(norm)` and `update(seen, memory)`, whose data is in
`memory`, a pytree of arrays with fixed shapes. It has no `__call__`, since
`optax.inject_hyperparams` treats callables as schedules. Rules fit any scope and norm
unless their help names one.

A rule learns from each norm separately, and only from finite norms above 0. A norm that
is NaN, inf or 0 keeps its own memory, pauses its own warm-up, and does not affect other
norms. A gradient of exactly 0 comes from an idle expert, a frozen layer or a masked
loss, and its size says nothing about later gradients. Three rules also learn from
zeros: `previous_norm`, `mean_over_rms` and `moment`. The loss rules of `skip` do too,
since a loss of 0 is a loss.

Numbers and optax schedules are passed as they are. A schedule is called with the step,
an int32 scalar that starts at 0 and also counts non-finite steps.

The column "own" of the table states whether the norm of a step enters its own
threshold. In `skip` no norm or loss does: rules answer before they learn, and otherwise
a spike would raise its own limit. Until a rule has learned, the threshold is inf, or
its `max_norm`.

==================== ===================================== ========= ===================
rule                 threshold                             own       published as
==================== ===================================== ========= ===================
`relative_to_params` a fraction of the parameters' norm    no        AGC
`initial_norm`       the parameters' first norm            no        Hyperball
`previous_norm`      scales by the previous step's norm    always
`quantile`           a quantile of the last norms          yes       AutoClip
`mean_plus_std`      mean + k deviations of the last norms no        Levanter
`zscore`             running mean + z deviations           yes       ZClip
`ema`                a multiple of the running norm        in warmup AdaGC, OLMo, AGGC
`mean_over_rms`      steadiness of the norms, at most 1    yes       Stable-SPAM's AdaGN
`moment`             each element's running power mean     yes       ACClip
`of_gradients`       another rule, applied to gradients    as rule   ACClip
`of`                 another rule, of one norm per leaf    as rule
`scaled`             another rule, scaled and bounded      as rule
`current`            the norm of this step                 always
==================== ===================================== ========= ===================

In `skip`, "always" stays: the threshold is a fraction of this norm by definition. The
warm-up of `ema` bounds the total of all norms of a step; a single norm is not included.
"""

from ._thresholds._average_rules import ema, mean_over_rms, zscore
from ._thresholds._element_rules import moment
from ._thresholds._norm_rules import (
    current,
    initial_norm,
    previous_norm,
    relative_to_params,
)
from ._thresholds._rule import Rule, Seen
from ._thresholds._rules_of_rules import of, of_gradients, scaled
from ._thresholds._window_rules import mean_plus_std, quantile

__all__ = [
    "Rule",
    "Seen",
    "current",
    "ema",
    "initial_norm",
    "mean_over_rms",
    "mean_plus_std",
    "moment",
    "of",
    "of_gradients",
    "previous_norm",
    "quantile",
    "relative_to_params",
    "scaled",
    "zscore",
]
