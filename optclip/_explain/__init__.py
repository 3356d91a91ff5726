"""Explain a step: the leaves, rows, examples and positions of its gradient.

`_step` holds the losses and the batch, `_attribution` computes the gradient and what
each loss contributes to it, `_leaf_sizes` measures leaves and slices, and `_findings`
writes the sentences of an `_explanation`, whose lists have `_entries`.
"""
