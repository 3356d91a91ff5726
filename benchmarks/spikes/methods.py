"""Every way to clip, skip or reset, each around the same Adam."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import optclip
from optclip import recipes

Make = Callable[[Any], Any]

# Around the norms of gradients before the spikes, from a third of them to far above.
THRESHOLDS = (0.1, 0.3, 1.0, 3.0, 10.0)
# Norms without spikes stay below 5, from the first step on; the mislabelled batch has 38
# to 80: ten is out of reach of the one and far below the other.
MEGATRON = 10.0
# ACClip's steps are as small as the elements of a gradient, so Adam's learning rate
# teaches it little. Of 100, 300, 1000 and 3000 times that the first was the best.
ACCLIP_RATE = 100.0


class Method(NamedTuple):
    """A name and how to make the optimizer, from what ends it."""

    name: str
    make: Make
    family: str = ""  # of these only the best is ranked


def descent() -> optax.GradientTransformationExtraArgs:
    """Descend at the learning rate that `update` is given.

    A schedule of its own would count steps, and stand still while steps are skipped: a
    burst of the learning rate would then come at other steps.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, rate: Any, **_: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def before(clip: Any) -> Make:
    """A clip of the gradients."""
    return lambda end: optax.chain(clip, optax.scale_by_adam(), end)


def instead(adam: Any) -> Make:
    """What takes Adam's place."""
    return lambda end: optax.chain(adam, end)


def behind(clip: Any) -> Make:
    """A clip of the steps themselves."""
    return lambda end: optax.chain(optax.scale_by_adam(), end, clip)


def around(skip: Callable[..., Any], *numbers: Any) -> Make:
    """Steps left out whole."""
    return lambda end: skip(optax.chain(optax.scale_by_adam(), end), *numbers)


def all_methods() -> list[Method]:
    """No clip, five thresholds, and every recipe with its defaults."""
    return [
        Method("no clip", instead(optax.scale_by_adam())),
        *(
            Method(
                f"global norm {c:g}", before(optclip.clip_by_global_norm(c)), "tuned"
            )
            for c in THRESHOLDS
        ),
        *(Method(each.__name__, before(each())) for each in BEFORE),
        *(Method(each.__name__, instead(each())) for each in INSTEAD),
        Method(
            f"acclip, rate x {ACCLIP_RATE:g}",
            instead(optax.chain(recipes.acclip(), optax.scale(ACCLIP_RATE))),
        ),
        Method("clippy", behind(recipes.clippy())),
        Method("olmo_skip", around(recipes.olmo_skip)),
        Method("axlearn_skip", around(recipes.axlearn_skip)),
        Method("megatron_skip", around(recipes.megatron_skip, MEGATRON)),
    ]


BEFORE = (
    recipes.agc, recipes.autoclip, recipes.zclip, recipes.adagc, recipes.aggc,
    recipes.mean_std_clip, recipes.olmo_ratio, recipes.auto_s, recipes.sclip,
    recipes.uclip,
)  # fmt: skip
INSTEAD = (recipes.spam, recipes.stable_spam, recipes.acclip, recipes.stable_adamw)
