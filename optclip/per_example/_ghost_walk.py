"""The walk over the jaxpr of a loss: where parameters meet data.

A *weight* is what is computed from parameters alone. An equation that takes a weight
and data is a *site*. All that a gradient needs is there: the data that went in, and the
cotangent of what came out. `planned` finds the sites, `tapped` runs the loss with a
zero, a tap, added to the output of each, so that the derivative by the tap is that
cotangent. `replayed` computes the outputs again from the parameters and the data that
was kept, nothing else: what is differentiated where no formula for a norm is known.

This is the one file that knows what a jaxpr looks like. It leans on `jax.make_jaxpr`,
on the fields of jaxprs, of equations (with `ctx.manager`) and of variables, on
`Primitive.bind` and `get_bind_params`, and on names and parameters of the primitives
scan (`jaxpr`, `length`, `reverse`, `unroll`), checkpoint (`jaxpr`, `prevent_cse`,
`policy`) and jit (`jaxpr`). An equation that it does not know is a site.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

DATA, CONST = "data", "const"

# What moves the elements of one array about, all of them or some.
MOVES = frozenset(
    "transpose reshape squeeze expand_dims rev copy copy_p neg slice split name"
    " broadcast_in_dim convert_element_type sharding_constraint".split()
)
CALLS = frozenset(["jit", "pjit", "closed_call", "core_call"])
REMATS = frozenset(["checkpoint", "remat", "remat2"])
# Derivatives by their operands depend on none of them.
AFFINE = frozenset(["add", "sub", "add_any", "concatenate"])

# A larger weight that a loop changes is not kept for all examples at once.
LARGE = 2**20


class Weight(NamedTuple):
    """Computed from some leaves of the parameters, and from constants."""

    leaves: frozenset[int]
    # Elements of one leaf, each once, so that a gradient has the norm of the leaf's.
    is_moved: bool = True
    # Of each scan around: whether it takes a slice a step, or the same one each time.
    stacked: tuple[bool, ...] = ()


Info = Weight | str


class Site(NamedTuple):
    """Where weights meet data, or one is made data (then `eqn` is None)."""

    key: int
    eqn: Any
    infos: tuple[Info, ...]
    avals: tuple[Any, ...]
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        return "identity" if self.eqn is None else self.eqn.primitive.name

    @property
    def weights(self) -> list[int]:
        return [i for i, info in enumerate(self.infos) if isinstance(info, Weight)]

    @property
    def leaves(self) -> frozenset[int]:
        return frozenset().union(*(self.infos[i].leaves for i in self.weights))

    @property
    def kept(self) -> list[int]:
        """Which operands the derivative by the weights may need."""
        if self.name in AFFINE:
            return []
        return [i for i, info in enumerate(self.infos) if info == DATA]

    def zeros(self) -> tuple[jax.Array, ...]:
        return tuple(
            jnp.zeros(self.lengths + aval.shape, aval.dtype) for aval in self.avals
        )

    def is_plain(self) -> bool:
        """Whether its derivative by a weight that all steps use is one operation."""
        return self.eqn is None or not any("jaxpr" in key for key in self.eqn.params)


class Step(NamedTuple):
    """What is done about one equation."""

    eqn: Any
    outs: tuple[Info, ...]
    site: Site | None = None
    inner: "Plan | None" = None
    # Operands that are made data first.
    demoted: dict[int, Site] = {}  # noqa: RUF012
    num_consts: int = 0
    num_carry: int = 0


class Plan(NamedTuple):
    """What is done about the equations of a jaxpr."""

    jaxpr: Any
    consts: list[Any]
    steps: list[Step]
    outs: tuple[Info, ...]
    sites: list[Site]


def planned(closed: Any, infos: list[Info], first: int = 0, lengths=()) -> Plan:
    """What to do about a jaxpr whose inputs are such; sites are numbered from `first`."""
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict.fromkeys(jaxpr.constvars, CONST) | dict(
        zip(jaxpr.invars, infos, strict=True)
    )
    steps, sites = [], []
    for eqn in jaxpr.eqns:
        ins = tuple(_read(env, eqn.invars, CONST))
        step = _step(eqn, ins, first + len(sites), lengths)
        sites += step.demoted.values()
        sites += [step.site] if step.site else []
        sites += step.inner.sites if step.inner else []
        env.update(zip(eqn.outvars, step.outs, strict=True))
        steps.append(step)
    outs = tuple(_read(env, jaxpr.outvars, CONST))
    return Plan(jaxpr, list(getattr(closed, "consts", ())), steps, outs, sites)


def _step(eqn: Any, ins: tuple[Info, ...], first: int, lengths) -> Step:
    name = eqn.primitive.name
    if not any(isinstance(info, Weight) for info in ins):
        info = DATA if DATA in ins or eqn.effects else CONST
        return Step(eqn, (info,) * len(eqn.outvars))
    if name in CALLS | REMATS:
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = planned(body, ins, first, lengths)
        return Step(eqn, inner.outs, inner=inner)
    data = (DATA,) * len(eqn.outvars)
    if eqn.effects:
        # It may write to a reference, of which nobody knows then what is in it.
        return Step(eqn, data, demoted=_demoted(eqn, ins, ins, first, lengths))
    if DATA not in ins:
        return Step(eqn, tuple(_derived(eqn, ins, out.aval) for out in eqn.outvars))
    if name == "scan":
        step = _scan_step(eqn, ins, first, lengths)
        if step is not None:
            return step
    avals = tuple(out.aval for out in eqn.outvars if is_inexact(out.aval))
    site = Site(first, eqn, ins, avals, lengths) if avals else None
    return Step(eqn, data, site=site)


def _derived(eqn: Any, ins: tuple[Info, ...], aval: Any) -> Info:
    """What an equation of weights and constants gives."""
    if not is_inexact(aval) or eqn.primitive.name == "stop_gradient":
        return CONST
    weights = [info for info in ins if isinstance(info, Weight)]
    leaves = frozenset().union(*(weight.leaves for weight in weights))
    is_moved = (
        eqn.primitive.name in MOVES
        and all(weight.is_moved for weight in weights)
        and aval.size <= eqn.invars[0].aval.size
        and jnp.issubdtype(aval.dtype, jnp.floating)
    )
    return Weight(leaves, is_moved, weights[0].stacked)


def _demoted(eqn, ins, which, first: int, lengths) -> dict[int, Site]:
    found = {}
    for i, info in enumerate(which):
        if isinstance(info, Weight):
            aval = eqn.invars[i].aval
            found[i] = Site(first + len(found), None, (ins[i],), (aval,), lengths)
    return found


def _scan_step(eqn: Any, ins: tuple[Info, ...], first: int, lengths) -> Step | None:
    """Sites in the body; None if the loop is better left alone."""
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    num_xs = sum(map(_is_stacked, eqn.invars, body.invars))
    num_carry = len(eqn.outvars) - sum(map(_is_stacked, eqn.outvars, body.outvars))
    num_consts = len(ins) - num_carry - num_xs
    changes = {
        num_consts + i
        for i in range(num_carry)
        if body.outvars[i] is not body.invars[num_consts + i]
    }
    # Of what changes only the first value is a weight.
    changed = [ins[i] if i in changes else CONST for i in range(len(ins))]
    demoted = _demoted(eqn, ins, changed, first, lengths)
    if any(eqn.invars[i].aval.size > LARGE for i in demoted):
        return None
    inside = [
        DATA if i in changes else _inside(info, i >= num_consts + num_carry)
        for i, info in enumerate(ins)
    ]
    length = eqn.params["length"]
    inner = planned(
        eqn.params["jaxpr"], inside, first + len(demoted), (*lengths, length)
    )
    carry = tuple(
        DATA if i in changes else ins[i]
        for i in range(num_consts, num_consts + num_carry)
    )
    ys = tuple(
        info._replace(is_moved=False, stacked=info.stacked[:-1])
        if isinstance(info, Weight)
        else info
        for info in inner.outs[num_carry:]
    )
    return Step(eqn, carry + ys, None, inner, demoted, num_consts, num_carry)


def _inside(info: Info, is_stacked: bool) -> Info:
    if not isinstance(info, Weight):
        return info
    return info._replace(stacked=(*info.stacked, is_stacked))


def _is_stacked(outer: Any, inner: Any) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def tapped(plan: Plan, args: list[Any], taps: dict[int, Any]) -> tuple[list, dict]:
    """The outputs, and of each site the data that weights met."""
    env = _env(plan, args)
    records = {}
    for step in plan.steps:
        values = _read(env, step.eqn.invars)
        for i, site in step.demoted.items():
            values[i] = lax.add(values[i], taps[site.key][0])
            records[site.key] = ()
        if step.inner is None:
            outs = _bound(step.eqn, values)
            if step.site is not None:
                outs = _added(outs, taps[step.site.key])
                records[step.site.key] = tuple(values[i] for i in step.site.kept)
        else:
            own = {site.key: taps[site.key] for site in step.inner.sites}
            outs, found = _tapped_inner(step, values, own)
            records |= found
        env.update(zip(step.eqn.outvars, outs, strict=True))
    return _read(env, plan.jaxpr.outvars), records


def _tapped_inner(step: Step, values: list, taps: dict) -> tuple[list, dict]:
    params, inner = step.eqn.params, step.inner
    if step.eqn.primitive.name in CALLS:
        return tapped(inner, values, taps)
    if step.eqn.primitive.name in REMATS:
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *args: tapped(inner, *args), **options)(
            values, taps
        )

    def body(carry, given):
        xs, taps = given
        outs, records = tapped(inner, consts + carry + xs, taps)
        return outs[: step.num_carry], (outs[step.num_carry :], records)

    consts, carry, xs = _split(step, values)
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, (ys, records) = lax.scan(body, carry, (xs, taps), **options)
    return carry + ys, records


def replayed(plan: Plan, args: list[Any], records: dict) -> tuple[list, dict]:
    """The outputs, None for data, and those of the sites that there are records of."""
    env = _env(plan, args)
    found = {}
    for step in plan.steps:
        values = _read(env, step.eqn.invars)
        for i, site in step.demoted.items():
            if site.key in records:
                found[site.key] = (values[i],)
        outs = [None] * len(step.outs)
        if step.inner is not None:
            outs, own = _replayed_inner(step, values, records)
            found |= own
        elif step.site is not None:
            if step.site.key in records:
                found[step.site.key] = _site_outputs(step.site, values, records)
        elif DATA not in step.outs:
            outs = _bound(step.eqn, values)
        env.update(zip(step.eqn.outvars, outs, strict=True))
    return _read(env, plan.jaxpr.outvars), found


def _site_outputs(site: Site, values: list, records: dict) -> tuple:
    kept = dict(zip(site.kept, records[site.key], strict=True))
    for i, info in enumerate(site.infos):
        if info == DATA:
            aval = site.eqn.invars[i].aval
            values[i] = kept[i] if i in kept else jnp.zeros(aval.shape, aval.dtype)
    outs = _bound(site.eqn, values)
    pairs = zip(site.eqn.outvars, outs, strict=True)
    return tuple(out for var, out in pairs if is_inexact(var.aval))


def _replayed_inner(step: Step, values: list, records: dict) -> tuple[list, dict]:
    inner = step.inner
    if step.eqn.primitive.name != "scan":
        return replayed(inner, values, records)
    sites = [site for site in inner.sites if site.key in records]
    own = {site.key: records[site.key] for site in sites}
    consts, carry, xs = _split(step, values)

    def body(given):
        xs, records, _ = given
        inside = [None if i in changed else x for i, x in enumerate(carry)]
        outs, found = replayed(inner, consts + inside + xs, records)
        return outs[step.num_carry :], found

    changed = {i for i in range(step.num_carry) if step.outs[i] == DATA}
    steps = xs, own, jnp.arange(step.eqn.params["length"])
    # All steps at once, unless that would keep a gradient for each of them.
    is_plain = all(site.is_plain() for site in sites)
    ys, found = jax.vmap(body)(steps) if is_plain else lax.map(body, steps)
    fixed = [None if i in changed else x for i, x in enumerate(carry)]
    return fixed + ys, found


def _split(step: Step, values: list) -> tuple[list, list, list]:
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
    """The outputs of an equation, as `jax.core.eval_jaxpr` makes them."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Before jax 0.10 functions were apart.
    functions, params = params if isinstance(params, tuple) else ((), params)
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*functions, *values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _env(plan: Plan, args: list[Any]) -> dict:
    jaxpr = plan.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    return dict(zip(names, [*plan.consts, *args], strict=True))


def _read(env: dict, names: list, literal: Any = None) -> list:
    return [
        (name.val if literal is None else literal)
        if isinstance(name, Literal)
        else env[name]
        for name in names
    ]
