"""Compute per-example gradient norms and their clipped sum without the gradients.

`_plan` finds in the jaxpr of one example's loss where parameters meet data. `_walk`
runs the loss by that plan and records data and outputs there. `_choice` decides how to
measure each leaf. `_ghost_backward` runs the backward pass of
each example down to these places, and computes gradients from them. `_sites` selects
the places that have a formula for the norm, and `_formulas` implements the formulas.
`_squares` combines them into the squared norms of a batch.
"""
