"""Wrap an optimizer or a clipping transformation.

===================== =================================================================
`skip`                skip steps whose norm or loss is too large or not finite
`with_error_feedback` add the part that clipping removed to the next step (U-Clip)
`with_periodic_reset` reset an optimizer's state at regular intervals (SPAM)
`clip_before`         clip gradients, and store the optimizer's state first
`clip_after`          clip an optimizer's updates, given its gradients (ACClip)
===================== =================================================================
"""

from optclip.wrappers._clip_after import clip_after as clip_after
from optclip.wrappers._clip_before import clip_before as clip_before
from optclip.wrappers._error_feedback import with_error_feedback as with_error_feedback
from optclip.wrappers._periodic_reset import with_periodic_reset as with_periodic_reset
from optclip.wrappers._skip import skip as skip

__all__ = [
    "clip_after",
    "clip_before",
    "skip",
    "with_error_feedback",
    "with_periodic_reset",
]
