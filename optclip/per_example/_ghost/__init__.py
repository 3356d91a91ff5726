"""Norms of the gradient of each example, without the gradients.

=========== ==========================================================================
`_plan`     where parameters meet data, read off the jaxpr of the loss of one example
`_walk`     runs the loss by that plan, and keeps what went in there and came out
`_sites`    which of these places have a formula for the norm
`_formulas` these formulas
`_choice`   what is done about each leaf, and the memory that it takes
`_squares`  all of it: the squared norms of a batch
=========== ==========================================================================

The gradient of the weighted sum of the losses, a second pass, is made in `_weighted`.
"""
