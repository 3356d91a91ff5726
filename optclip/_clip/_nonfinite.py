"""List the policies for NaN and inf, by the values of `nonfinite=`.

propagate   a non-finite norm makes all elements that share it NaN (`alarm` in
            `_coefficient`); elements moved to bounds keep NaN, and inf moves to its
            bound (`_element_bounds`)
zero        all elements that share a non-finite norm become zero (`respond` in
            `_coefficient`, `scaled_or_zeroed` in `_scale`, `bounded` in
            `_element_bounds`)
raise       like propagate, and an error under `jax.experimental.checkify` (`check`
            below)

For singular values, `spectral/_singular_values._by_policy` does the same. Where a
norm is not finite, a rule's infinite threshold is made finite in `thresholds/_memory`,
so that the policy applies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from optclip._arrays import _leaves
from optclip._arrays._types import KeyPath

POLICIES = ("propagate", "zero", "raise")


def check(
    paths: list[KeyPath], arrays: list[jax.Array], norms: list[jax.Array]
) -> None:
    """Raise under checkify an error that names each leaf with a non-finite entry.

    A norm may also be non-finite because it overflows or was passed by the caller.
    """
    for path, x in zip(paths, arrays, strict=True):
        # A debug check is inert outside checkify; a plain one would break jit.
        checkify.debug_check(
            jnp.all(jnp.isfinite(x)),
            f"non-finite update in {_leaves.named(path)} (nonfinite='raise')".replace(
                "{", "{{"
            ).replace("}", "}}"),
        )
    for norm in norms:
        finite = jnp.all(jnp.isfinite(norm))
        checkify.debug_check(finite, "non-finite norm (nonfinite='raise')")
