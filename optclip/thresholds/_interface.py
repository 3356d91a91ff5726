"""Private names of `thresholds` that other optclip packages use."""

from optclip.thresholds._fixed import Constant as Constant
from optclip.thresholds._fixed_thresholds import (
    fixed_thresholds as fixed_thresholds,
)
from optclip.thresholds._fixed_thresholds import is_fixed as is_fixed
from optclip.thresholds._memory import Context as Context
from optclip.thresholds._memory import init_memory as init_memory
from optclip.thresholds._memory import learned_thresholds as learned_thresholds
from optclip.thresholds._relative_to_params import RelativeToParams as RelativeToParams
from optclip.thresholds._rule import Rule as Rule
from optclip.thresholds._threshold_argument import Named as Named
from optclip.thresholds._threshold_argument import as_rules as as_rules
from optclip.thresholds._threshold_argument import is_rule as is_rule
from optclip.thresholds._threshold_argument import one_rule as one_rule
