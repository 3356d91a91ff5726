"""Mistakes that a type checker finds in a user's code before it runs.

Each line has one, and pyright fails the build where it does not find it.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import jax.numpy as jnp

import optclip
from optclip import functional, recipes, thresholds


def mistakes() -> None:
    """Contain the mistakes; never called, since each line would raise."""
    optclip.clip_by_global_norm("1.0")  # pyright: ignore[reportArgumentType]
    optclip.clip_by_global_norm(1.0, response="hrad")  # pyright: ignore[reportArgumentType]
    optclip.clip_by_global_norm(1.0, record="leafs")  # pyright: ignore[reportArgumentType]
    optclip.clip_by_global_norm(1.0, max_norm=2.0)  # pyright: ignore[reportCallIssue]
    optclip.clip_by_norm(1.0, axis="rows")  # pyright: ignore[reportArgumentType]
    optclip.clip_by(1.0, over=thresholds.ema())  # pyright: ignore[reportArgumentType]
    optclip.groups()  # pyright: ignore[reportCallIssue]
    functional.clip_by_global_norm(jnp.ones(2), "1")  # pyright: ignore[reportArgumentType]
    functional.clip_by_global_norm(
        jnp.ones(2),
        thresholds.ema(),  # pyright: ignore[reportArgumentType]
    )
    recipes.zclip(stict=True)  # pyright: ignore[reportCallIssue]
    recipes.autoclip(strict="yes")  # pyright: ignore[reportArgumentType]
    thresholds.quantile(0.9, 16.0)  # pyright: ignore[reportArgumentType]
