"""Clipping per example.

`_clipped_grad` measures the gradients of a loss per example, explicitly
(`_example_gradients`) or by the formulas in `_ghost`. `_bound` computes the
coefficients, and `_clip_then_sum` the sum. `_clipped_sum` receives the gradients of
each example.
"""

from ._clipped_grad import norms
