"""Clip or measure the gradient of each example, for private or robust training.

========================= ============================================================
`clipped_grad`            of a loss of one example the sum of clipped gradients, and
                          how much one example changes it at most
`norms`                   how large the gradient of each example is
`clipped_sum`             the same sum of gradients that are there already
`aggregate`               that as an aggregator for optax
`QuantileThreshold`       a threshold that a part of the examples stays below
`ExampleInfo`             what each example had: value, norm, coefficient
========================= ============================================================

Noise, sampling and accounting are the work of other libraries.
"""

from optclip.per_example._clipped_grad import ClippedGrad as ClippedGrad
from optclip.per_example._clipped_grad import clipped_grad as clipped_grad
from optclip.per_example._clipped_sum import aggregate as aggregate
from optclip.per_example._clipped_sum import clipped_sum as clipped_sum
from optclip.per_example._example_norms import ExampleNorms as ExampleNorms
from optclip.per_example._example_norms import norms as norms
from optclip.per_example._info import ExampleInfo as ExampleInfo
from optclip.per_example._method import Plan as Plan
from optclip.per_example._quantile_threshold import QuantileState as QuantileState
from optclip.per_example._quantile_threshold import (
    QuantileThreshold as QuantileThreshold,
)

__all__ = [
    "ClippedGrad",
    "ExampleInfo",
    "ExampleNorms",
    "Plan",
    "QuantileState",
    "QuantileThreshold",
    "aggregate",
    "clipped_grad",
    "clipped_sum",
    "norms",
]
