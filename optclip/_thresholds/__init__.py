"""Thresholds: fixed ones, rules that learn, and the memory that rules learn in.

`_rule` defines the protocol, and `_threshold_argument` converts an argument to rules.
`_learning` runs a rule over the norms of a tree, as a tree or as one vector, checks its
results, and selects the norms that change its memory. The other files hold the rules,
by the kind of their memory.
"""

from ._average_rules import ema, mean_over_rms, zscore
from ._element_rules import ema_of_max, moment, second_moment
from ._learning import (
    at_step,
    init_memory,
    is_fixed,
    learned_thresholds,
    norms_of_rules,
)
from ._norm_rules import RelativeToParams, relative_to_params
from ._rule import Rule, Seen, Threshold, ThresholdTree, WithoutMemory, is_rule
from ._rules_of_rules import Bounds, Scaled, bounds, of_gradients
from ._threshold_argument import (
    Constant,
    Named,
    Schedule,
    as_named,
    as_rules,
    one_rule,
)
from ._window_rules import mean_plus_std, of_ranks, quantile
