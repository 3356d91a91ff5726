"""Clipping per example.

`_clipped_grad` measures the gradients of a loss per example by a `_method`: explicitly
(`_example_gradients`), or by the formulas in `_ghost`. `_bound_argument` parses the
bound, `_example_clip` computes the coefficients, and `_clip_then_sum` or
`_weighted_sum` the sum. `_clipped_sum` receives the gradients of each example.
"""

from ._example_norms import norms
