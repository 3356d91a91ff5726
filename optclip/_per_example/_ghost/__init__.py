"""Compute per-example gradient norms and their clipped sum without the gradients.

`_plan` finds in the jaxpr of one example's loss where parameters meet data. `_walk`
runs the loss by that plan and records data and outputs there. `_sites` decides how to
measure each leaf, and `_formulas` implements the formulas. `_ghost_backward` runs the
backward pass of each example down to these places, and computes squared norms and
gradients from them.
"""
