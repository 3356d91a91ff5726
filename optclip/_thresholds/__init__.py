"""Thresholds: fixed ones, rules that learn, and the memory that rules learn in.

`_rule` defines the protocol, and `_threshold_argument` converts an argument to rules.
`_memory` runs a rule over the norms of a tree, as a tree or as one vector;
`_rule_results` checks its results, and `_learning` selects the norms that change its
memory. `_window` and `_running` hold the statistics that rules share.
"""

from ._bounds import Bounds, bounds
from ._current import current
from ._element_rules import ema_of_max, moment, second_moment
from ._ema import ema
from ._fixed import Constant
from ._mean_over_rms import mean_over_rms
from ._mean_plus_std import mean_plus_std
from ._memory import (
    at_step,
    init_memory,
    is_fixed,
    learned_thresholds,
)
from ._of import of
from ._of_gradients import of_gradients
from ._quantile import quantile
from ._relative_to_params import relative_to_params
from ._rule import Rule, Seen, Threshold, ThresholdTree, is_rule
from ._scaled import scaled
from ._threshold_argument import Named, as_rules, one_rule, value_of
from ._zscore import zscore
