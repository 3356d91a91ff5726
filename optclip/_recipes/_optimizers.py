"""Replace Adam, or limit the final update."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from .. import _responses as responses
from .. import _thresholds as thresholds
from .._arrays import _batching, _leaves, _prefix, _validate
from .._arrays._numerics import as_array, promotable, ratio
from .._arrays._types import KeyPath, LeafLike, PyTree
from .._spectral import MatrixAxes, Method, matrices, scale_by_shape, singular_values
from .._thresholds import Named, Seen, WithoutMemory
from .._transforms import clip_by
from .._typing import ClipOptions, MomentClipOptions, Number, NumberOrSchedule
from .._wrappers import clip_after, transformation, with_periodic_reset
from ._recipe_options import (
    adam_if_none,
    build,
    for_record,
    masked,
    reject_zero_after_moments,
    scheduled,
    unwrapped,
)


def spam(
    inner: optax.GradientTransformation | None = None,
    *,
    theta: Number = 5000.0,
    b2: Number = 0.999,
    every: int = 500,
    warmup: int = 150,
    grace: int = 20,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip spikes of single elements, then apply Adam with periodic resets (SPAM).

    With `v` the running mean square of an element, a gradient with `g**2 > theta * v`
    becomes `sign(g) * sqrt(theta * v)`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optclip.recipes.spam(grace=1), optax.scale(-1e-3))
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1e6):
      ...     updates, state = tx.update(jnp.array([size]), state)
      >>> print(f"{optclip.metrics(state)['clip/threshold']:.2f}")
      2.24

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam(b2=b2)`.
      theta: Maximum square of an element, as a multiple of `v`.
      b2: Decay of `v` and of Adam's second moment, from 0 to 1.
      every: Number of steps between resets of the moments and of `v`.
      warmup: Number of steps after a reset with scaled updates; see
        `optclip.with_periodic_reset`.
      grace: Number of unclipped steps at the start and after each reset.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation that replaces Adam; add a learning rate after it. Elements
      without earlier gradients are not clipped; the authors' code clips them to zero
      until the next reset.

    References:
      Huang et al., *SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM
      Training*, 2025, arXiv:2501.06842, algorithm 1.
    """
    _validate.fraction("b2", b2)
    grace = _validate.length("grace", grace, least=0)
    first = optax.scale_by_adam(b2=b2) if inner is None else inner
    clip = build(
        spam, clip_by, options, thresholds.second_moment(theta, b2, grace),
        over="element",
    )  # fmt: skip
    chain = optax.chain(clip, transformation("inner", first))
    return with_periodic_reset(chain, every, warmup=warmup)


def stable_spam(
    inner: optax.GradientTransformation | None = None,
    *,
    decay: Number = 0.999,
    b1: Number = 0.7,
    b2: Number = 0.9,
    every: int = 1000,
    **options: Unpack[ClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip elements, normalize leaves to a steady norm, then apply Adam (Stable-SPAM).

    With debiased running averages of each leaf's largest element (`peak`), norm
    (`mean`) and squared norm (`square`)::

        g = g / max(|g|) * peak if |g| > peak
        g = g / norm * mean / (sqrt(square) + eps)

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.stable_spam()
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 1000.0):
      ...     updates, state = tx.update(jnp.array([size, 1.0]), state)
      >>> print(f"{optclip.metrics(state)['max/threshold']:.0f}")
      501

    Args:
      inner: The optimizer to wrap. Default: `optax.scale_by_adam()`.
      decay: Decay of the largest element's average.
      b1: Decay of the norm's average.
      b2: Decay of the squared norm's average.
      every: Number of steps between resets of `inner`; thresholds are not reset.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation that replaces Adam; add a learning rate after it. Its records are
      named `max` (elements) and `norm` (leaves); with `name="x"`, `x_max` and `x_norm`.

      A reset does not affect the averages. The authors' code restarts their step
      counter, so that thresholds are hundreds of times too large after a reset, and
      resets one step later.

    See Also:
      `thresholds.mean_over_rms`, the rule of the leaves.

    References:
      Huang et al., *Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam*,
      2025, arXiv:2502.17055v2.
    """
    elements = build(
        stable_spam, clip_by, for_record("max", options), thresholds.ema_of_max(decay),
        over="element", response="proportional",
    )  # fmt: skip
    leaves = build(
        stable_spam, clip_by, for_record("norm", options),
        thresholds.mean_over_rms(b1, b2), over="leaf", response="normalize",
    )  # fmt: skip
    reset = with_periodic_reset(adam_if_none(inner), every, warmup=0, keep_counts=False)
    return optax.chain(elements, leaves, reset)


def acclip(
    b1: Number = 0.9,
    b2: Number = 0.99,
    alpha: Number = 1.0,
    eps: Number = 1e-5,
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Clip the momentum's elements to the gradient's running mean modulus (ACClip).

    In each step::

        m = b1 * m + (1 - b1) * g
        tau**alpha = b2 * tau**alpha + (1 - b2) * |g|**alpha
        update = min(1, tau / (|m| + eps)) * m

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.acclip()
      >>> updates, _ = tx.update(jnp.array([1.0]), tx.init(jnp.zeros(1)))
      >>> print(f"{updates[0]:.4f}")
      0.0100

    Args:
      b1: Decay of the momentum.
      b2: Decay of the threshold.
      alpha: Power of the mean, from 1 to 2 in the paper.
      eps: Number added to the modulus of the momentum.
      options: Options of `clip_by`, except `eps` and separate masks.

    Returns:
      A transformation that replaces Adam; add a learning rate after it.

    Raises:
      ValueError: `nonfinite="zero"` is passed, which would hide NaN moments.

    See Also:
      `thresholds.moment`, the rule.

    References:
      Zhang et al., *Why are Adaptive Methods Good for Attention Models?*, 2020,
      arXiv:1912.03194.
    """
    _validate.fraction("b1", b1)
    _validate.fraction("b2", b2)
    _validate.plain("alpha", alpha, above=True)
    reject_zero_after_moments("acclip", options)
    # As a function the response scales. Moved to its bound, an infinite moment would
    # stay hidden.
    clip = build(
        acclip, clip_by, options, thresholds.of_gradients(thresholds.moment(alpha, b2)),
        over="element", response=responses.Hard().coefficient, eps=eps,
    )  # fmt: skip
    momentum = masked(optax.ema(promotable(b1), debias=False), _leaves.are_floating)
    return clip_after(momentum, clip)


@dataclasses.dataclass(frozen=True)
class _UnitQuotient(WithoutMemory):
    """Divide updates by the norm of `quotients` where it exceeds 1."""

    quotients: Callable[[Seen], PyTree]

    def update(self, seen: Seen, memory: PyTree) -> tuple[PyTree, PyTree]:
        excess = seen.measure(self.quotients(seen))
        return _batching.each(_allowed, seen.norm, seen.finite, excess), memory


def _allowed(norm: jax.Array, finite: jax.Array, excess: jax.Array) -> jax.Array:
    one, inf = jnp.ones_like(norm), jnp.full_like(norm, jnp.inf)
    # Quotients of 0 set no limit. Their divisor is 1, which avoids 0 / 0.
    none = excess == 0
    allowed = jnp.where(none, inf, ratio(norm, jnp.where(none, one, excess)))
    # Norms below 2**-60 read 0. Their threshold is inf unless the quotients exceed 1,
    # since a threshold of 0 would zero an update that is allowed.
    return jnp.where(~finite | ((norm == 0) & (excess <= 1)), inf, allowed)


def stable_adamw(
    b1: Number = 0.9,
    b2: Number = 0.99,
    eps: Number = 1e-6,
    weight_decay: float | jax.Array = 0.0,
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Scale AdamW down in leaves whose second moment is outdated (StableAdamW).

    Per leaf, `u = u / max(1, rms)` with `rms = sqrt(mean(g**2 / max(v, eps**2)))`,
    where `v` is Adam's debiased second moment.

    Example:
      >>> import jax.numpy as jnp, optclip
      >>> tx = optclip.recipes.stable_adamw()
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 1.0, 1000.0):
      ...     updates, state = tx.update(jnp.array([size]), state, jnp.zeros(1))
      >>> print(f"{optclip.metrics(state)['clip/coefficient']:.2f} {updates[0]:.2f}")
      0.58 0.37

    Args:
      b1: Decay of Adam's first moment.
      b2: Decay of Adam's second moment.
      eps: Adam's `eps`, also used in `rms`.
      weight_decay: AdamW's weight decay; if not 0, `update` requires `params`.
      options: Options of `clip_by`, except `eps` and separate masks.

    Returns:
      A transformation that replaces `optax.scale_by_adam` and `add_decayed_weights`;
      add a learning rate after it. It records the RMS of each update and its limit.

    Raises:
      ValueError: `nonfinite="zero"` is passed, which would hide NaN moments.

    References:
      Wortsman et al., *Stable and low-precision training for large-scale
      vision-language models*, 2023, arXiv:2304.13013, algorithm 2.
    """
    _validate.fraction("b1", b1)
    _validate.fraction("b2", b2)
    _validate.plain("eps", eps)
    _validate.plain("weight_decay", weight_decay)
    reject_zero_after_moments("stable_adamw", options)
    b1, b2, eps, weight_decay = map(promotable, (b1, b2, eps, weight_decay))

    def over_second_moment(seen: Seen) -> PyTree:
        count, nu = (
            optax.tree.get(seen.extra["inner_state"], name) for name in ("count", "nu")
        )

        def quotient(g: LeafLike, v: LeafLike) -> LeafLike:
            if not _leaves.is_floating(g):
                return g
            wide = _leaves.widen(jnp.asarray(g))
            dtype = jnp.abs(wide).dtype
            log = jnp.log(jnp.asarray(b2, dtype))
            correction = -jnp.expm1(count.astype(dtype) * log)
            root = jnp.sqrt(v.astype(dtype) / correction)
            # v may be 0. The bound keeps the norm finite and its inverse normal.
            return jnp.minimum(_quotient(wide, jnp.maximum(root, eps)), 2.0**60)

        return jax.tree.map(quotient, seen.extra["gradients"], nu)

    inner = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    clip = build(
        stable_adamw, clip_by, options, _UnitQuotient(over_second_moment),
        over="leaf", norm="rms",
    )  # fmt: skip
    if _validate.concrete(weight_decay) != 0:
        inner = optax.chain(inner, optax.add_decayed_weights(weight_decay))
    return clip_after(masked(inner, _leaves.are_floating), clip)


def clippy(
    relative: Number = 0.5, absolute: Number = 0.01, **options: Unpack[ClipOptions]
) -> optax.GradientTransformationExtraArgs:
    """Scale steps so that no weight changes by more than a fraction of itself (Clippy).

    Each leaf's step is multiplied by the minimum over its elements of
    `min(1, (relative * |w| + absolute) / |step|)`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> tx = optax.chain(optax.sgd(1.0), optclip.recipes.clippy(absolute=0.0))
      >>> params = jnp.array([1.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([2.0, 2.0]), tx.init(params), params)
      >>> print(updates)
      [-0.5 -0.5]

    Args:
      relative: Maximum change as a fraction of the weight; 0.1 in TensorFlow
        Recommenders.
      absolute: Maximum change of a weight of 0; 1e-7 in TensorFlow Recommenders.
      options: Options of `clip_by`, except separate masks.

    Returns:
      A transformation; place it last, after the learning rate. `update` requires
      `params`. It records the largest element of each step and its limit.

    References:
      Tang et al., *Improving Training Stability for Multitask Ranking Models in
      Recommender Systems*, 2023, arXiv:2302.09178; defaults from ports of its code.
    """
    _validate.plain("relative", relative)
    _validate.plain("absolute", absolute)

    def over_allowed(seen: Seen) -> PyTree:
        _validate.params_given(seen.params, "since recipes.clippy is relative to them")

        def quotient(path: KeyPath, u: LeafLike, w: LeafLike | None) -> LeafLike:
            if not _leaves.is_floating(u):
                return u
            if w is None:
                raise ValueError(_prefix.lacks_leaf("params", path, seen.params))
            size = jnp.abs(_leaves.widen(jnp.asarray(w)))
            least = as_array(absolute).astype(size.dtype)
            allowed = as_array(relative).astype(size.dtype) * size + least
            return _quotient(_leaves.widen(jnp.asarray(u)), allowed)

        reason = "which clippy compares element by element"
        _leaves.flatten_dense(seen.updates, reason)
        # Updates may be None where parameters are arrays.
        params = _prefix.lookup(seen.params, seen.updates)
        _leaves.flatten_dense(params, reason)
        return jax.tree.map_with_path(quotient, seen.updates, params)

    return build(
        clippy, clip_by, options, _UnitQuotient(over_allowed), over="leaf", norm="inf"
    )


def _quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return `|x| / divisor`, or a very large number if only the divisor is 0."""
    size = jnp.abs(x)
    none = divisor == 0
    # A divisor of 0 is replaced by 1 to keep NaN out of the quotient and its
    # derivative.
    quotient = ratio(size, jnp.where(none, jnp.ones_like(divisor), divisor))
    largest = jnp.asarray(jnp.finfo(size.dtype).max / 2, size.dtype)
    return jnp.where(none & (size > 0), largest, quotient)


def spectra(
    inner: optax.GradientTransformation | None = None,
    max_value: NumberOrSchedule = 10.0,
    *,
    max_gradient: NumberOrSchedule | None = None,
    learning_rate: Callable[[jax.Array], Any] | None = None,
    warmup: int = 0,
    matrix_axes: MatrixAxes = (-2, -1),
    transposed: Callable[[str], bool] | None = None,
    method: Method = "newton_schulz",
    **options: Unpack[MomentClipOptions],
) -> optax.GradientTransformationExtraArgs:
    """Cap the singular values of an optimizer's updates smoothly (SPECTRA).

    Each matrix `u` becomes `sqrt(max(1, outputs / inputs)) * H(u)`, where `H` replaces
    each singular value `s` by `s / sqrt(1 + s**2 / c**2)`. The cap `c` is `max_value`,
    multiplied during the warm-up by `learning_rate(warmup) / learning_rate(step)`.

    Example:
      >>> import jax.numpy as jnp, optax, optclip
      >>> rate = optax.warmup_constant_schedule(0.0, 0.1, warmup_steps=100)
      >>> tx = optax.chain(
      ...     optclip.recipes.spectra(max_value=1.0, learning_rate=rate, warmup=100),
      ...     optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(rate),
      ... )
      >>> kernel = jnp.eye(4, 16)
      >>> updates, state = tx.update(kernel, tx.init(kernel), kernel)
      >>> clip = optclip.recipes.spectra(optax.identity(), max_value=1.0)
      >>> print(f"{clip.update(3 * kernel, clip.init(kernel))[0][0, 0]:.2f}")
      1.90

    Args:
      inner: The optimizer to wrap, without learning rate and weight decay. Default:
        `optax.scale_by_adam()`.
      max_value: Smooth cap of the updates' singular values: a number or a schedule.
      max_gradient: The same for gradients, before `inner`. Default: None, as the
        authors recommend; their code has 0.1.
      learning_rate: Schedule of the learning rate; requires `warmup`. Default: None.
      warmup: Number of first steps that scale both caps by `learning_rate`.
      matrix_axes: Axes of a kernel's inputs and outputs, `(..., -1)` for convolutions;
        see `optclip.matrices`. Other axes are batch axes.
      transposed: Function of a leaf's path that returns whether the outputs are on the
        first of these axes, as for the authors' embeddings `(vocabulary, features)`:
        `lambda path: "embed" in path`. Default: none.
      method: `"newton_schulz"` or `"eigh"`; see `optclip.clip_by_singular_value`.
      options: `mask`, `axis_name`, `nonfinite`, `record` and `name`, as in
        `optclip.clip_by_singular_value`.

    Returns:
      A transformation that replaces Adam; add weight decay and learning rate after it.
      The record of `max_gradient` is named `gradient`; with `name="x"`, `x_gradient`.

    Raises:
      ValueError: Only one of `learning_rate` and `warmup` is passed, or
        `nonfinite="zero"` is passed, which would hide NaN moments.

    Differences from the authors' code:
      - A vector's singular value is its norm, which `max_value` also scales below `c`,
        so that the output is continuous; `max_gradient` excludes vectors.
      - `apply_to="2d"`, which excludes all vectors, is
        `mask=lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)`.
      - For a cap that decays at the end of training, pass a schedule as `max_value`.

    References:
      Jiang, Semenov and Stich, *Enhancing LLM Training via Spectral Clipping*, 2026,
      arXiv:2603.14315; defaults and warm-up from its code.
    """
    warmup = _checked_warmup(learning_rate, warmup)
    wanted = "a function of a leaf's path, or None"
    _validate.kind("transposed", transposed, (Callable, type(None)), wanted)
    reject_zero_after_moments("spectra", options)
    chosen = unwrapped(options)

    def factor(step: jax.Array) -> jax.Array:
        """Return the factor of the cap that keeps cap times learning rate fixed."""
        rate_after: Any = learning_rate
        last = rate_after(jnp.asarray(warmup, step.dtype))
        # Smaller learning rates count as 1e-10, as in the authors' code.
        rate = jnp.maximum(rate_after(step), 1e-10)
        return jnp.where(step < warmup, last / rate, 1.0)

    def capped(argument: str, value: NumberOrSchedule, options: dict[str, Any]) -> Any:
        if not callable(value):
            _validate.number(argument, value)
        cap = scheduled(operator.mul, value, factor) if warmup else value
        limit = Named(argument, cap)
        return build(
            spectra, clip_by, options, limit, norm="l2", response="smooth", eps=0.0,
            over=singular_values(matrix_axes, method=method),
        )  # fmt: skip

    before = optax.identity()
    if max_gradient is not None:
        cap = capped("max_gradient", max_gradient, for_record("gradient", options))
        before = masked(cap, _are_matrices)
    return optax.chain(
        before,
        transformation("inner", adam_if_none(inner)),
        capped("max_value", max_value, chosen),
        scale_by_shape(
            matrices(matrix_axes), transposed,
            chosen.get("mask"), chosen.get("axis_name"),
        ),
    )  # fmt: skip


def _checked_warmup(learning_rate: Any, warmup: Any) -> int:
    wanted = "an optax schedule, or None"
    advice = _validate.static("learning_rate", learning_rate)
    kinds = Callable, type(None)
    _validate.kind("learning_rate", learning_rate, kinds, wanted, advice)
    warmup = _validate.length("warmup", warmup, least=0)
    if (learning_rate is None) == (warmup > 0):
        raise ValueError(
            "`learning_rate` and `warmup` must be passed together, got"
            f" learning_rate={learning_rate!r} and warmup={warmup}. Pass both to raise"
            " the caps during the warm-up, or neither."
        )
    return warmup


def _are_matrices(tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: len(getattr(x, "shape", ())) > 1, tree, is_leaf=_leaves.is_sparse
    )
