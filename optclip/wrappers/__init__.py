"""Around an optimizer or a clip: what changes more than one gradient.

===================== =================================================================
`skip`                leave out a step whose norm or loss is off, moments and all
`with_error_feedback` add what was cut off to the next step: U-Clip
`with_periodic_reset` reset an optimizer's moments every so many steps: SPAM
`clip_before`         clip before an optimizer, whose state stays in front
`clip_after`          clip what an optimizer returns, seeing the gradients: ACClip
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
