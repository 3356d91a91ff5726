"""What is known of each example after its gradient was clipped."""

from typing import Any, NamedTuple

import jax

from optclip._arrays._types import PyTree


class ExampleInfo(NamedTuple):
    """What each example had and what became of it, none of which is private.

    Nothing here is covered by a privacy guarantee: publishing a loss or a norm of one
    example tells about that example. Every array has the batch axis first; padding has
    zeros, but for `aux`.

    Args:
      values: the loss of each example; None where gradients were given.
      norms: the norm of each example before the clip: `(batch,)` over the tree, a dict
        of such by label for groups, a tree of such for leaves.
      coefficients: what each gradient was multiplied by to be clipped, in the structure
        of `norms`, before `"unit"` and `normalize_by` divide; 0 for padding.
      nonfinite: whether an example had a norm that is not finite, in the structure of
        `norms`; such an example adds nothing under `nonfinite="zero"`.
      padding: which places of the batch are padding, `(batch,)` of bools.
      aux: what the loss returned beside its value, None without `has_aux`.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> loss = lambda w, example: jnp.sum(w * example)
      >>> f = optclip.per_example.clipped_grad(loss, 1.0, strict=False)
      >>> batch = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> _, info = f(jnp.ones(2), batch, padding=jnp.array([False, True]))
      >>> print(info.values, info.norms, info.coefficients)
      [7. 0.] [5. 0.] [0.2 0. ]
    """

    values: jax.Array | None
    norms: PyTree
    coefficients: PyTree
    nonfinite: PyTree
    padding: jax.Array
    aux: Any = None
