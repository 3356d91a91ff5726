"""The clipping of jax_privacy, by optclip."""

import jax
import jax.numpy as jnp
from jax_privacy import clipping

from optclip import functional, per_example

FILES = ("tests/clipping_test.py", "tests/gradient_clipping_test.py")
SELECT = ""
PASSED = 196
KNOWN = {
    "test_clip_pytree_clip_norm_zero_rescale": (
        "`strict=True`, which bounds the norm after rounding, stays 1.3e-4 below."
    ),
    "test_validate_args_empty_batch": "Another message.",
    "test_validate_args_inconsistent_batch_size": "Another message.",
    "test_validate_args_overlap": "Another message.",
}


def clip_pytree(
    pytree, clip_norm, rescale_to_unit_norm=False, nan_safe=True, return_zero=False
):
    if nan_safe:  # Elements, where `nonfinite="zero"` would zero the tree.
        pytree = jax.tree.map(
            lambda x: jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), pytree
        )
    clipped, norm = functional.clip_by_global_norm(pytree, clip_norm, strict=True)
    if rescale_to_unit_norm:
        units, _ = functional.clip_by_global_norm(
            pytree, 1.0, response="normalize", strict=True
        )
        clipped = jax.tree.map(
            lambda x, unit: jnp.where(clip_norm > 0, x / clip_norm, unit),
            clipped,
            units,
        )

    def selected(x, like):
        return jnp.where(return_zero, 0, x).astype(like.dtype)

    return jax.tree.map(selected, clipped, pytree), norm


def clipped_grad(
    fun,
    argnums=0,
    has_aux=False,
    *,
    l2_clip_norm,
    rescale_to_unit_norm=False,
    normalize_by=1.0,
    batch_argnums=1,
    keep_batch_dim=True,
    return_values=False,
    return_grad_norms=False,
    pre_clipping_transform=None,
    microbatch_size=None,
    prng_argnum=None,
):
    data = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums

    def loss(*args):
        args = list(args)
        for i in data if keep_batch_dim else ():
            args[i] = jax.tree.map(lambda x: x[None], args[i])
        return fun(*args)

    clip = {
        "response": "unit" if rescale_to_unit_norm else "hard",
        "normalize_by": normalize_by,
        "strict": False,
    }
    differentiate = {
        "argnums": argnums,
        "has_aux": has_aux,
        "batch_argnums": data if prng_argnum is None else (*data, prng_argnum),
        "microbatch_size": microbatch_size,
    }
    clipped = per_example.clipped_grad(loss, l2_clip_norm, **differentiate, **clip)

    def call(*args, is_padding_example=None):
        args = list(args)
        if prng_argnum is not None:
            size = len(jax.tree.leaves(args[data[0]])[0])
            args[prng_argnum] = jax.random.split(args[prng_argnum], size)
        if pre_clipping_transform is None:
            grads, info = clipped(*args, padding=is_padding_example)
        else:
            unclipped = per_example.clipped_grad(
                loss, jnp.inf, **differentiate, reduce="none"
            )
            grads, info = unclipped(*args)
            grads, _ = per_example.clipped_sum(
                jax.vmap(pre_clipping_transform)(grads), l2_clip_norm, **clip
            )
        # optclip sums in float32.
        grads = jax.tree.map(
            lambda g, x: g.astype(jnp.result_type(x)), grads, args[argnums]
        )
        if not (has_aux or return_values or return_grad_norms):
            return grads
        return grads, clipping.AuxiliaryOutput(info.values, info.norms, info.aux)

    return call


OWNERS = ((clipping, clip_pytree), (clipping, clipped_grad))
