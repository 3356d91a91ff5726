"""Run a plan: the loss with taps, or only the parts computed from parameters.

`tapped` adds a zero, called a tap, to the output of each site, so that the derivative
with respect to the tap is the cotangent there. `replayed` computes these outputs again
from the parameters and the recorded data. Differentiating it gives the gradients of
leaves without a formula for the norm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._plan import (
    CALLS,
    DATA,
    REMATS,
    EquationPlan,
    JaxprPlan,
    Site,
    is_inexact,
    read,
)


def tapped(plan: JaxprPlan, args: list[Any], taps: dict[int, Any]) -> tuple[list, dict]:
    """Return the outputs, and the data that meets weights at each site."""
    env = _env(plan, args)
    records = {}
    for step in plan.steps:
        values = read(env, step.eqn.invars)
        for i, site in step.demoted.items():
            values[i] = lax.add(values[i], taps[site.key][0])
            records[site.key] = ()
        if step.inner is None:
            outs = _bound(step.eqn, values)
            if step.site is not None:
                outs = _added(outs, taps[step.site.key])
                records[step.site.key] = tuple(values[i] for i in step.site.kept)
        else:
            inner_taps = {site.key: taps[site.key] for site in step.inner.sites}
            outs, inner_records = _tapped_inner(step, step.inner, values, inner_taps)
            records |= inner_records
        env.update(zip(step.eqn.outvars, outs, strict=True))
    return read(env, plan.jaxpr.outvars), records


def _tapped_inner(
    step: EquationPlan, inner: JaxprPlan, values: list, taps: dict
) -> tuple[list, dict]:
    params = step.eqn.params
    if step.eqn.primitive.name in CALLS:
        return tapped(inner, values, taps)
    if step.eqn.primitive.name in REMATS:
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *args: tapped(inner, *args), **options)(
            values, taps
        )

    def body(carry, slices):
        xs, taps = slices
        outs, records = tapped(inner, consts + carry + xs, taps)
        return outs[: step.num_carry], (outs[step.num_carry :], records)

    consts, carry, xs = _split(step, values)
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, (ys, records) = lax.scan(body, carry, (xs, taps), **options)
    return carry + ys, records


def replayed(plan: JaxprPlan, args: list[Any], records: dict) -> tuple[list, dict]:
    """Return the outputs, None for data, and the outputs of recorded sites."""
    env = _env(plan, args)
    site_outputs = {}
    for step in plan.steps:
        values = read(env, step.eqn.invars)
        for i, site in step.demoted.items():
            if site.key in records:
                site_outputs[site.key] = (values[i],)
        outs = [None] * len(step.outs)
        if step.inner is not None:
            outs, inner_outputs = _replayed_inner(step, step.inner, values, records)
            site_outputs |= inner_outputs
        elif step.site is not None:
            if step.site.key in records:
                site_outputs[step.site.key] = _site_outputs(step.site, values, records)
        elif DATA not in step.outs:
            outs = _bound(step.eqn, values)
        env.update(zip(step.eqn.outvars, outs, strict=True))
    return read(env, plan.jaxpr.outvars), site_outputs


def _site_outputs(site: Site, values: list, records: dict) -> tuple:
    data = dict(zip(site.kept, records[site.key], strict=True))
    for i, info in enumerate(site.infos):
        if info == DATA:
            aval = site.eqn.invars[i].aval
            values[i] = data[i] if i in data else jnp.zeros(aval.shape, aval.dtype)
    pairs = zip(site.eqn.outvars, _bound(site.eqn, values), strict=True)
    return tuple(out for var, out in pairs if is_inexact(var.aval))


def _replayed_inner(
    step: EquationPlan, inner: JaxprPlan, values: list, records: dict
) -> tuple[list, dict]:
    if step.eqn.primitive.name != "scan":
        return replayed(inner, values, records)
    sites = [site for site in inner.sites if site.key in records]
    scanned_records = {site.key: records[site.key] for site in sites}
    consts, carry, xs = _split(step, values)

    def body(slices):
        xs, records, _ = slices
        inside = [None if i in changed else x for i, x in enumerate(carry)]
        outs, site_outputs = replayed(inner, consts + inside + xs, records)
        return outs[step.num_carry :], site_outputs

    changed = {i for i in range(step.num_carry) if step.outs[i] == DATA}
    steps = xs, scanned_records, jnp.arange(step.eqn.params["length"])
    # Vectorize over steps, unless that would store a gradient for each of them.
    is_plain = all(site.is_plain() for site in sites)
    ys, site_outputs = jax.vmap(body)(steps) if is_plain else lax.map(body, steps)
    fixed = [None if i in changed else x for i, x in enumerate(carry)]
    return fixed + ys, site_outputs


def _split(step: EquationPlan, values: list) -> tuple[list, list, list]:
    middle = step.num_consts + step.num_carry
    return (
        values[: step.num_consts],
        values[step.num_consts : middle],
        values[middle:],
    )


def _added(outs: list, taps: tuple) -> list:
    rest = iter(taps)
    return [lax.add(out, next(rest)) if is_inexact(out) else out for out in outs]


def _bound(eqn: Any, values: list) -> list:
    """Return the outputs of an equation, as `jax.core.eval_jaxpr` computes them."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Before JAX 0.10, `get_bind_params` returned functions separately.
    functions, params = params if isinstance(params, tuple) else ((), params)
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*functions, *values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _env(plan: JaxprPlan, args: list[Any]) -> dict:
    jaxpr = plan.jaxpr
    return dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*plan.consts, *args], strict=True)
    )
