"""Clip gradients per example, for differentially private and robust training.

- `clipped_grad`: sum of clipped per-example gradients of a loss, and its sensitivity.
- `norms`: gradient norm of each example.
- `clipped_sum`: sum of per-example gradients that are already computed.
- `aggregate`: the same sum as an optax aggregator.
- `QuantileThreshold`: threshold that follows a quantile of the norms.
- `ExampleInfo`: loss, norm and coefficient of each example.

Noise, sampling and accounting are left to other libraries, such as `jax_privacy`.
"""

from ._per_example._clip_then_sum import ExampleInfo
from ._per_example._clipped_grad import ClippedGrad, clipped_grad, norms
from ._per_example._clipped_sum import aggregate, clipped_sum
from ._per_example._quantile_threshold import QuantileThreshold

__all__ = [
    "ClippedGrad",
    "ExampleInfo",
    "QuantileThreshold",
    "aggregate",
    "clipped_grad",
    "clipped_sum",
    "norms",
]
