"""The entries of a plan: contractions, parameters, and how they are quantized."""

import dataclasses
import functools
from typing import Any, Literal

from .._added import added
from .._treescope import changed_fields, constructor
from ..tensor import QSpec
from ._origin import Address, Loop

Shape = tuple[int | str, ...]
"""Sizes when the plan was made; a symbolic size is its name."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a site of a plan.

    Attributes:
      role: `"weight"` or `"activation"`.
      spec: how it is quantized, with absolute granularity; `None` leaves it in float.
      key: name of its statistics and scale, such as `layer0/w:dot_general:lhs`.
      path: key path of the weight, the first of several joined; `None` for an activation.
      axes: for each axis of a weight at the site, the axes of the parameter that it holds; empty
        if they are the same; not compared.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> plan = jqx.make_plan(lambda p, x: x @ p["w"], jqx.presets.w8a8())(
      ...     {"w": jnp.eye(2)}, jnp.ones((1, 2))
      ... )
      >>> [(operand.role, operand.key) for operand in plan.sites[0].operands]
      [('activation', 'w:dot_general:lhs'), ('weight', 'w:dot_general:rhs')]
    """

    role: Literal["weight", "activation"]
    spec: QSpec | None
    key: str
    path: str | None = None
    axes: tuple[tuple[int, ...], ...] = added((), compare=False)

    __treescope_repr__ = changed_fields


@dataclasses.dataclass(frozen=True)
class Site:
    """One contraction that a plan quantizes: an entry of `Plan.sites`.

    Attributes:
      address: its address in the traced function.
      path: key path of its weight inside the parameters, all paths of joined ones (`a+b`), or its
        name scope if it has no weight.
      scope: name scopes around it in the function.
      op: the operation, such as `dot_general`.
      operands: left and right, or the table of a lookup.
      output: how the result is quantized; `None` leaves it in float.
      output_key: name of the result's statistics and scale.
      rule: index in the policy of the rule that applies. If no rule is for the site but one is for
        another use of its weight, the index of that rule.
      loops: scans that step over its weights: its statistics and scales have a leading axis for
        each.
      shapes: shapes of the operands when the plan was made, a symbolic size as its name; not
        compared.
      result: shape of the result, in the same form; not compared.
      macs: multiply-adds when the plan was made, `None` if a size was symbolic; not compared.
      codes: the operation of the other use from which its weight takes its codes, if its own rule
        gives it none, or others: a weight has one set of codes. `None` if its own rule applies.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> plan = jqx.make_plan(lambda p, x: x @ p["w"], jqx.presets.w8a8())(
      ...     {"w": jnp.eye(2)}, jnp.ones((1, 2))
      ... )
      >>> site = plan.sites[0]
      >>> site.path, site.op, site.macs, list(site.static_specs())
      ('w', 'dot_general', 4, ['w:dot_general:lhs'])
    """

    address: Address
    path: str
    scope: str
    op: str
    operands: tuple[Operand, ...]
    output: QSpec | None
    output_key: str
    rule: int
    loops: tuple[Loop, ...]
    shapes: tuple[Shape, ...] = dataclasses.field(compare=False)
    result: Shape = dataclasses.field(compare=False)
    macs: int | None = dataclasses.field(compare=False)
    codes: str | None = added(None)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        names = "path op shapes operands output rule result macs loops codes".split()
        known = {name: getattr(self, name) for name in names}
        info = {name: x for name, x in known.items() if x is not None and x != ()}
        return constructor(self, info, path, subtree_renderer)

    @property
    def name(self) -> str:
        """Its path and operation, numbered if other sites have both.

        For example `layer0/w:dot_general`; `convert` evaluates that site in the name scope
        `jqx[layer0/w:dot_general]`.
        """
        return self.output_key.removesuffix(":out")

    @property
    def label(self) -> str:
        """What tables call it: its path, or `(argument)` for a weight that is a whole argument, or
        the end of its `name`, such as `(dot_general#1)`, for what has neither weight nor scope.
        """
        is_weight = any(operand.path is not None for operand in self.operands)
        return label_of(self.path, self.name, is_weight)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the statistics of its operands and of its result."""
        return (*(operand.key for operand in self.operands), self.output_key)

    def scale_shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a static scale in one step of its loops."""
        shapes = dict(zip((o.key for o in self.operands), self.shapes, strict=False))
        shape: Any = shapes.get(key, self.result)
        return self.static_specs()[key].granularity.scale_shape(shape)

    def loops_in(self, here: Address) -> tuple[Loop, ...]:
        """Returns those of its loops that are inside an equation."""
        n = len(here)
        return tuple(x for x in self.loops if len(x.address) > n and x.address[:n] == here)

    def static_specs(self) -> dict[str, QSpec]:
        """Returns the specs that need calibrated scales, by key."""
        return dict(self._static_specs)

    @functools.cached_property
    def _static_specs(self) -> dict[str, QSpec]:
        specs = {o.key: o.spec for o in self.operands if o.role == "activation" and o.spec}
        if self.output is not None:
            specs[self.output_key] = self.output
        return {key: spec for key, spec in specs.items() if not spec.dynamic}


@dataclasses.dataclass(frozen=True)
class Skipped:
    """One contraction that a plan leaves in float, and the reason: an entry of `Plan.skipped`.

    Attributes:
      address: its address in the traced function; `()` if it is never evaluated as a site.
      path: key path of its weight inside the parameters, or its name scope if it has no weight.
      op: the operation, such as `dot_general`.
      reason: why it stays in float.
      shapes: shapes of the operands when the plan was made, a symbolic size as its name; not
        compared.
      macs: multiply-adds when the plan was made, `None` if a size was symbolic; not compared.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda p, x: (x @ p["w"]) @ p["v"]
      >>> policy = jqx.presets.w8a16("w")
      >>> plan = jqx.make_plan(f, policy)({"w": jnp.eye(2), "v": jnp.eye(2)}, jnp.ones((1, 2)))
      >>> [(item.path, item.reason) for item in plan.skipped]
      [('v', 'no rule matches')]
    """

    address: Address
    path: str
    op: str
    reason: str
    shapes: tuple[Shape, ...] = dataclasses.field(compare=False)
    macs: int | None = dataclasses.field(compare=False)

    __treescope_repr__ = changed_fields


@dataclasses.dataclass(frozen=True)
class Unreached:
    """One parameter with two or more axes that no contraction multiplies by, and the reason: an
    entry of `Plan.unreached`.

    Attributes:
      path: its path inside the parameters.
      reason: how it is used instead.
      shape: its shape.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda p, x: x @ p["w"] + p["table"].sum()
      >>> params = {"w": jnp.eye(2), "table": jnp.ones((3, 2))}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(params, jnp.ones((1, 2)))
      >>> [(item.path, item.shape) for item in plan.unreached]
      [('table', (3, 2))]
    """

    path: str
    reason: str
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter that a plan quantizes: an entry of `Plan.weights`, or what `Plan.weight_at`
    returns.

    Attributes:
      path: its key path inside the parameters.
      spec: how it is quantized, with its granularity in its own axes.
      key: name of its scale among given scales.
      sites: number of sites that share it.
      contracted: -1 if its products contract its last axis, as in `x @ w.T`; `None` if they
        contract another one, or several; not compared.
      moved: its axes, counted from the last, that views in the function merge, split or move, as a
        reshape does; not compared. If -1 or -2 is among them, no target swaps or packs its codes.
      cut: its axes, counted from the last, of which views take parts, as a slice does, or that they
        join; not compared.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> plan = jqx.make_plan(lambda p, x: x @ p["w"], jqx.presets.w8a16())(
      ...     {"w": jnp.eye(2)}, jnp.ones((1, 2))
      ... )
      >>> weight = plan.weight_at("w")
      >>> weight.path, str(weight.spec), weight.sites
      ('w', 'int8 per_axis(1)', 1)
    """

    path: str
    spec: QSpec
    key: str
    sites: int
    contracted: int | None = added(None, compare=False)
    moved: tuple[int, ...] = added((), compare=False)
    cut: tuple[int, ...] = added((), compare=False)

    __treescope_repr__ = changed_fields


def label_of(path: str, name: str, is_weight: bool) -> str:
    """Returns what tables call a contraction; see `Site.label`."""
    return path or ("(argument)" if is_weight else f"({name.lstrip(':')})")
