"""Around an optimizer or a clip: what changes more than one gradient.

============== ========================================================================
`skip`         leave out a step whose norm or loss is off, moments and all
`with_error_feedback`   error feedback, what was cut off added to the next step: U-Clip
`with_periodic_reset`   reset an optimizer's moments every so many steps: SPAM
`after`        clip what an optimizer returns, with a look at the gradients: ACClip
============== ========================================================================
"""

from optclip.wrappers._after import after as after
from optclip.wrappers._carry import with_error_feedback as with_error_feedback
from optclip.wrappers._reset import with_periodic_reset as with_periodic_reset
from optclip.wrappers._skip import skip as skip

__all__ = ["after", "skip", "with_error_feedback", "with_periodic_reset"]
