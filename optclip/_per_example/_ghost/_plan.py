"""Plan a loss from its jaxpr: find where parameters meet data.

A *weight* is computed from parameters alone. An equation that combines a weight with
data is a *site*. A gradient depends only on its sites: the data that enters them, and
the cotangents of their outputs. `_walk` runs a plan.

Only this file and `_walk` depend on the structure of jaxprs. They use `jax.make_jaxpr`;
the fields of jaxprs, equations (including `ctx.manager`) and variables;
`Primitive.bind` and `get_bind_params`; and the names and
parameters of scan (`jaxpr`, `length`, `reverse`, `unroll`), checkpoint (`jaxpr`,
`prevent_cse`, `policy`) and jit (`jaxpr`). Any other equation is treated as a site.

The derivative from a site to a parameter is linear in the cotangent, so a scaled
cotangent gives a scaled gradient. A custom derivative between them may break this: its
rule may clip, round or filter. `is_linear` detects these cases. `is_narrow` detects
gradients that are rounded to fewer than 32 bits after the sum over examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from ..._arrays import _leaves

DATA, CONST = "data", "const"

# User functions compute their derivatives, and need not be linear in the cotangent: a
# rule may clip it, and an iterative solver may stop early.
_CUSTOM = frozenset(["custom_vjp_call", "custom_linear_solve"])

# Prefixes of primitive names, because some versions of JAX append suffixes.
_COLLECTIVES = (
    "psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter",
    "ragged_all_to_all", "pgather",
)  # fmt: skip

# Primitives that rearrange, negate or select the elements of one array.
MOVES = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "rev", "copy", "copy_p", "neg"}
    | {"slice", "split", "broadcast_in_dim", "convert_element_type", "name"}
    | {"sharding_constraint"}
)
CALLS = frozenset(["jit", "pjit", "closed_call", "core_call"])
REMATS = frozenset(["checkpoint", "remat", "remat2"])
# Their derivatives do not depend on their operands.
AFFINE = frozenset(["add", "sub", "add_any", "concatenate"])

# Number of elements above which a weight that a loop changes is not copied per example.
LARGE = 2**20


class Weight(NamedTuple):
    """Represent a value computed from some leaves of the parameters and constants."""

    leaves: frozenset[int]
    # Elements of one leaf, each at most once, so that gradients keep their norm.
    is_moved: bool = True
    # For each enclosing scan, whether it slices the weight per step or reuses it.
    stacked: tuple[bool, ...] = ()
    # Computed without a custom derivative.
    is_linear: bool = True
    # Computed in a dtype of fewer than 32 bits somewhere.
    is_narrow: bool = False


Info = Weight | str
Lengths = tuple[int, ...]


class Site(NamedTuple):
    """Represent an equation where weights meet data.

    If `eqn` is None, it is a single weight that is treated as data from there on.
    """

    key: int
    eqn: Any
    infos: tuple[Info, ...]
    avals: tuple[Any, ...]
    lengths: Lengths

    @property
    def name(self) -> str:
        return "identity" if self.eqn is None else self.eqn.primitive.name

    @property
    def weights(self) -> dict[int, Weight]:
        """Return the operands that are weights, by position."""
        return {
            i: info for i, info in enumerate(self.infos) if isinstance(info, Weight)
        }

    @property
    def leaves(self) -> frozenset[int]:
        return _leaves_of(self.weights.values())

    @property
    def kept(self) -> list[int]:
        """Return the operands that derivatives with respect to weights may need."""
        if self.name in AFFINE:
            return []
        return [i for i, info in enumerate(self.infos) if info == DATA]

    def zeros(self) -> tuple[jax.Array, ...]:
        return tuple(
            jnp.zeros(self.lengths + aval.shape, aval.dtype) for aval in self.avals
        )

    def is_linear(self) -> bool:
        """Return whether its leaves' gradients are linear in its cotangents."""
        weights_are = all(weight.is_linear for weight in self.weights.values())
        return weights_are and (self.eqn is None or not has_custom_derivative(self.eqn))

    def is_narrow(self) -> bool:
        """Return whether its leaves' gradients are rounded to fewer than 32 bits."""
        weights_are = any(weight.is_narrow for weight in self.weights.values())
        return weights_are or any(_leaves.is_narrow(aval) for aval in self.avals)

    def is_plain(self) -> bool:
        """Return whether the derivative by a weight is one operation."""
        params = () if self.eqn is None else self.eqn.params
        return not any("jaxpr" in key or key == "branches" for key in params)


class EquationPlan(NamedTuple):
    """Plan one equation."""

    eqn: Any
    outs: tuple[Info, ...]
    site: Site | None = None
    inner: JaxprPlan | None = None
    # Operands that are treated as data from here on.
    demoted: Mapping[int, Site] = MappingProxyType({})
    num_consts: int = 0
    num_carry: int = 0


class JaxprPlan(NamedTuple):
    """Plan the equations of a jaxpr."""

    jaxpr: Any
    consts: list[Any]
    steps: list[EquationPlan]
    outs: tuple[Info, ...]
    sites: list[Site]


def planned(
    closed: Any, infos: Sequence[Info], first: int = 0, lengths: Lengths = ()
) -> JaxprPlan:
    """Plan a jaxpr with these inputs; sites are numbered from `first`."""
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict.fromkeys(jaxpr.constvars, CONST) | dict(
        zip(jaxpr.invars, infos, strict=True)
    )
    steps, sites = [], []
    for eqn in jaxpr.eqns:
        ins = tuple(read(env, eqn.invars, CONST))
        step = _step(eqn, ins, first + len(sites), lengths)
        sites += step.demoted.values()
        sites += [step.site] if step.site else []
        sites += step.inner.sites if step.inner else []
        env.update(zip(eqn.outvars, step.outs, strict=True))
        steps.append(step)
    outs = tuple(read(env, jaxpr.outvars, CONST))
    return JaxprPlan(jaxpr, list(getattr(closed, "consts", ())), steps, outs, sites)


def _step(
    eqn: Any, ins: tuple[Info, ...], first: int, lengths: Lengths
) -> EquationPlan:
    name = eqn.primitive.name
    if not any(isinstance(info, Weight) for info in ins):
        info = DATA if DATA in ins or eqn.effects else CONST
        return EquationPlan(eqn, (info,) * len(eqn.outvars))
    if name in CALLS | REMATS:
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = planned(body, ins, first, lengths)
        return EquationPlan(eqn, inner.outs, inner=inner)
    data = (DATA,) * len(eqn.outvars)
    if eqn.effects:
        # An effect may write to a reference, whose contents are then unknown.
        return EquationPlan(eqn, data, demoted=_demoted(eqn, ins, ins, first, lengths))
    if DATA not in ins:
        outs = tuple(_derived(eqn, ins, out.aval) for out in eqn.outvars)
        return EquationPlan(eqn, outs)
    if name == "scan" and (step := _scan_step(eqn, ins, first, lengths)):
        return step
    avals = tuple(out.aval for out in eqn.outvars if is_inexact(out.aval))
    site = Site(first, eqn, ins, avals, lengths) if avals else None
    return EquationPlan(eqn, data, site=site)


def _derived(eqn: Any, ins: tuple[Info, ...], aval: Any) -> Info:
    """Return the kind of output of an equation of weights and constants."""
    if not is_inexact(aval) or eqn.primitive.name == "stop_gradient":
        return CONST
    weights = [info for info in ins if isinstance(info, Weight)]
    is_moved = (
        eqn.primitive.name in MOVES
        and all(weight.is_moved for weight in weights)
        and aval.size <= eqn.invars[0].aval.size
        and jnp.issubdtype(aval.dtype, jnp.floating)
    )
    is_linear = all(w.is_linear for w in weights) and not has_custom_derivative(eqn)
    is_narrow = any(w.is_narrow for w in weights) or _leaves.is_narrow(aval)
    leaves, stacked = _leaves_of(weights), weights[0].stacked
    return Weight(leaves, is_moved, stacked, is_linear, is_narrow)


def _demoted(
    eqn: Any, ins: Sequence[Info], which: Sequence[Info], first: int, lengths: Lengths
) -> dict[int, Site]:
    weights = [i for i, info in enumerate(which) if isinstance(info, Weight)]
    return {
        i: Site(key, None, (ins[i],), (eqn.invars[i].aval,), lengths)
        for key, i in enumerate(weights, first)
    }


def _scan_step(
    eqn: Any, ins: tuple[Info, ...], first: int, lengths: Lengths
) -> EquationPlan | None:
    """Plan the sites in the body; return None to treat the whole loop as a site."""
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    num_xs = sum(map(_is_stacked, eqn.invars, body.invars))
    num_carry = len(eqn.outvars) - sum(map(_is_stacked, eqn.outvars, body.outvars))
    num_consts = len(ins) - num_carry - num_xs
    changes = {
        num_consts + i
        for i in range(num_carry)
        if body.outvars[i] is not body.invars[num_consts + i]
    }
    # Only the first value of a changing carry is a weight.
    changed = [ins[i] if i in changes else CONST for i in range(len(ins))]
    demoted = _demoted(eqn, ins, changed, first, lengths)
    if any(eqn.invars[i].aval.size > LARGE for i in demoted):
        return None
    inside = [
        DATA if i in changes else _inside(info, i >= num_consts + num_carry)
        for i, info in enumerate(ins)
    ]
    inner = planned(
        eqn.params["jaxpr"], inside, first + len(demoted),
        (*lengths, eqn.params["length"]),
    )  # fmt: skip
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
    return EquationPlan(eqn, carry + ys, None, inner, demoted, num_consts, num_carry)


def _leaves_of(weights: Iterable[Weight]) -> frozenset[int]:
    return frozenset(leaf for weight in weights for leaf in weight.leaves)


def _inside(info: Info, is_stacked: bool) -> Info:
    if not isinstance(info, Weight):
        return info
    return info._replace(stacked=(*info.stacked, is_stacked))


def _is_stacked(outer: Any, inner: Any) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def read(env: dict, names: list, literal: Any = None) -> list:
    return [
        (name.val if literal is None else literal)
        if isinstance(name, Literal)
        else env[name]
        for name in names
    ]


def has_custom_derivative(eqn: Any) -> bool:
    """Return whether an equation may be nonlinear in its cotangent."""
    return any(each.primitive.name in _CUSTOM for each in _with_inner(eqn))


def collectives(jaxpr: Jaxpr, axes: Any) -> list[str]:
    """Return the names of the collectives over any of these mapped axes."""
    return [
        each.primitive.name
        for eqn in jaxpr.eqns
        for each in _with_inner(eqn)
        if each.primitive.name.startswith(_COLLECTIVES)
        and not {*axes}.isdisjoint(_axes_of(each))
    ]


def _axes_of(eqn: Any) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _with_inner(eqn: Any) -> Iterator[Any]:
    """Yield an equation, and the equations of the jaxprs in its parameters."""
    yield eqn
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(x, "jaxpr", x)
            if isinstance(body, Jaxpr):
                for inner in body.eqns:
                    yield from _with_inner(inner)
