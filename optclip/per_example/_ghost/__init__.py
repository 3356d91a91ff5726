"""Norms of the gradient of each example, and their clipped sum, without the gradients.

=========== ==========================================================================
`_plan`     where parameters meet data, read off the jaxpr of the loss of one example
`_walk`     runs the loss by that plan, and records data and outputs there
`_choice`   how each leaf is measured, and the memory that it takes
`_backward` the backward pass of each example as far as there, and gradients from it
`_sites`    which of these places have a formula for the norm
`_formulas` these formulas
`_squares`  all of it: the squared norms of a batch
=========== ==========================================================================
"""
