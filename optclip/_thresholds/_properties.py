"""Properties of rules, also of those inside another rule."""

from __future__ import annotations

from ._current import Current
from ._fixed import Constant
from ._of import Of
from ._of_gradients import OfGradients
from ._relative_to_params import RelativeToParams
from ._rule import Rule
from ._scaled import Scaled


def is_stateless(rule: Rule) -> bool:
    """Return whether a rule depends neither on the step count nor on a memory."""
    if isinstance(rule, Scaled) and rule.is_scheduled:
        return False
    if isinstance(rule, (Scaled, Of)):
        return is_stateless(rule.rule)
    return isinstance(rule, (Constant, Current, RelativeToParams))


def couples_norms(rule: Rule) -> bool:
    """Return whether the threshold of a norm depends on the other norms of its leaf."""
    if isinstance(rule, (Scaled, OfGradients)):
        return couples_norms(rule.rule)
    return isinstance(rule, Of)
