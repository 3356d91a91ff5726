"""Norms of the gradient of each example, and their clipped sum, without the gradients.

`_plan` reads off the jaxpr of the loss of one example where parameters meet data, and
`_walk` runs the loss by that plan and records data and outputs there. `_choice` decides
how each leaf is measured, and estimates the memory. `_ghost_backward` runs the backward
pass of each example down to these places, and computes gradients from them. `_sites`
selects the places that have a formula for the norm, and `_formulas` holds the formulas.
`_squares` puts it together: the squared norms of a batch.
"""
