"""Explain a step: the leaves, rows, examples and positions of its gradient.

`_attribution` holds the losses and the batch, and computes the gradient and the
contribution of each loss to it. `_leaf_sizes` measures leaves and slices, and
`_findings` writes the sentences of an `_explanation`.
"""
