"""Explain a step: the leaves, rows, examples and positions of its gradient.

`_step` holds the losses and the batch, `_attribution` computes the gradient and what
each loss contributes to it, `_leaves`, `_losses`, `_outliers` and `_nonfinite` select
the largest entries, and `_findings` writes the sentences.
"""
