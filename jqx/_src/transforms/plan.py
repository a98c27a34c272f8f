"""Plan: every contraction of a function, and how it is quantized. A static, hashable value, which
prints as a table and checks the scales that are passed for it.
"""

import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from ..checks import FLOATS, added, name_of
from ..errors import fail, nesting, some
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from ..statistics.calibrators import Affine
from ..table import Table, Tabular
from ..tensor.layout import check_zero_point
from ..tensor.products import Products
from ..tensor.serialize import (
    NONE,
    VERSION,
    Values,
    check_values,
    check_version,
    record_from_json,
    to_json,
)
from ..tensor.spec import QSpec
from .paths import (
    Hoisting,
    Params,
    Split,
    Weights,
    as_arguments,
    by_argument,
    check_same,
    is_parameter_line,
    is_whole,
    part_paths,
    split_leaf,
    stack_leaf,
)
from .views import Address, Loop

# The entries of a plan: contractions, parameters, and how they are quantized.


Shape = tuple[int | str, ...]
"""Sizes when the plan was made; a symbolic size is its name."""

GivenAffines = Mapping[str, Affine] | Literal["dynamic"] | None
"""The values that `affines=` of a transform takes."""


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
      products: how the three products are rounded in training; `None` if its rule does not say.

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
    products: Products | None = added(None)  # noqa: RUF009

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

    def loops_in(self, address: Address) -> tuple[Loop, ...]:
        """Returns those of its loops that are inside an equation."""
        n = len(address)
        return tuple(x for x in self.loops if len(x.address) > n and x.address[:n] == address)

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
        Of the kernel of a convolution both are.
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


def label_of(path: str, name: str, is_weight: bool) -> str:
    """Returns what tables call a contraction; see `Site.label`."""
    return path or ("(argument)" if is_weight else f"({name.lstrip(':')})")


@dataclasses.dataclass(frozen=True)
class Plan(Tabular):
    """The decisions of `make_plan`: sites, weights, and skipped contractions. Prints as a table.

    Attributes:
      sites: the contractions that are quantized.
      skipped: the contractions that are not.
      weights: the parameters that are quantized.
      params: position or positions of the arguments that hold weights.
      signature: one line per parameter and contraction of the function that the plan is for.
      names: key paths of parameters that `names=` of `make_plan` renames, each with its name;
        `None` for those that are not weights.
      unreached: float parameters that no contraction multiplies by; not compared.
      splits: parameters that are split into parts, each with its own path such as `layers/w[0:1]`,
        because rules select steps of a scan over them.
      hoisted: how `jqx.hoist` split the function, if it did.
      operations: the version of jax and the names of the other operations of the function,
        compressed; `bind` of a loaded file reads them. Not compared.
    """

    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    weights: tuple[Weight, ...]
    params: Params
    signature: tuple[str, ...]
    names: tuple[tuple[str, str | None], ...] = added(())
    unreached: tuple[Unreached, ...] = added((), compare=False)
    splits: tuple[Split, ...] = added(())
    hoisted: Hoisting | None = added(None)  # noqa: RUF009
    operations: str = added("", compare=False, repr=False)

    @functools.cached_property
    def parameters(self) -> Weights:
        """The arguments that hold weights, and the names of the weights."""
        lines = tuple(line for line in self.signature if is_parameter_line(line))
        return Weights(self.params, self.names, lines, self.splits)

    @property
    def fingerprint(self) -> str:
        """A hash of the planned function: its parameters and contractions, without batch sizes."""
        return hashlib.sha256("\n".join(self.signature).encode()).hexdigest()

    def static_specs(self) -> dict[str, QSpec]:
        """Returns the specs that need calibrated scales, by key."""
        return dict(self._static_specs)

    @functools.cached_property
    def _static_specs(self) -> dict[str, QSpec]:
        return {key: spec for site in self.sites for key, spec in site.static_specs().items()}

    def __getitem__(self, path: str) -> tuple[Site | Skipped, ...]:
        """Returns the contractions with a path, quantized or skipped, in order.

        Raises:
          KeyError: if there is none.
        """
        items = tuple(item for item in (*self.sites, *self.skipped) if item.path == path)
        if not items:
            paths = list(dict.fromkeys(item.path for item in (*self.sites, *self.skipped)))
            close = difflib.get_close_matches(str(path), paths) or paths
            problem = f"no contraction has the path {path!r}."
            fix = f"print the plan: it lists all {len(paths)} paths, such as {some(close)}."
            raise fail("Plan", problem, fix=fix, error=KeyError)
        return items

    def to_dict(self, values: Values = NONE) -> dict[str, Any]:
        """Returns the plan as a dict for `json.dumps`: jqx's own values by name and fields.

        Args:
          values: names for objects that are not part of jqx, such as a calibrator of yours. They
            are stored only by that name.

        Raises:
          TypeError: if `values` is not a dict of names.
          ValueError: if an object is neither part of jqx nor among `values`.

        Example:
          >>> import json, jqx, jax.numpy as jnp
          >>> f = lambda w, x: x @ w
          >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(jnp.eye(2), jnp.ones((1, 2)))
          >>> data = json.dumps(plan.to_dict())
          >>> jqx.Plan.from_dict(json.loads(data)) == plan
          True
        """
        check_values("Plan.to_dict", values)
        return {"version": VERSION, **to_json("Plan.to_dict", self, Plan, values)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], values: Values = NONE) -> "Plan":
        """Returns the plan that `to_dict` has written, equal to it. Nothing is imported by name.

        Args:
          data: from `to_dict`, or from `json.loads`.
          values: the objects that are not part of jqx, by the names that they were stored with.

        Raises:
          ValueError: if the version, a field or a name is unknown; if a field is missing or has the
            wrong type; or if an object is not among `values`.
          TypeError: if `values` is not a dict of names, or a value rejects its fields.
        """
        check_values("Plan.from_dict", values)
        fields = check_version("Plan.from_dict", data)
        with nesting("Plan.from_dict"):
            return record_from_json("Plan.from_dict", fields, Plan, values, "plan")

    def map_weights(self, f: Callable[[Weight, Any], Any], params: Any) -> Any:
        """Returns parameters with `f(weight, leaf)` in place of each leaf that is to be quantized,
        such as codes that an algorithm chooses. The others are the very same objects. For a weight
        that the plan splits, `f` is called for each part, and `Segments` take its place.

        Args:
          f: a function of a `Weight` of the plan and of its array.
          params: the parameters that the plan was made for; a tuple of arguments if there are
            several.

        Example:
          >>> import jqx, jax.numpy as jnp
          >>> params = {"w": jnp.eye(2), "b": jnp.zeros(())}
          >>> f = lambda p, x: x @ p["w"] + p["b"]
          >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(params, jnp.ones((1, 2)))
          >>> codes = plan.map_weights(lambda w, x: jqx.QTensor.quantize(x, w.spec), params)
          >>> codes["w"]
          QTensor(int8[2, 2] per_axis(1), scale float32[1, 2], dtype=float32, 12 bytes)
        """
        tree = by_argument(self.params, params)

        def mapped_at(path: str | None, leaf: Any) -> Any:
            weight = self.weight_at(path)
            return leaf if weight is None else f(weight, leaf)

        leaves = []
        for name, leaf in self.parameters.named("Plan.map_weights", tree):
            split = self.split_of(name)
            paths = part_paths(name, split)
            if any(map(self.weight_at, paths)):
                parts = split_leaf("Plan.map_weights", leaf, split)
                leaf = stack_leaf(list(map(mapped_at, paths, parts)), split)
            leaves.append(leaf)
        mapped = jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_whole), leaves)
        return as_arguments(self.params, mapped)

    def site_at(self, address: Address) -> Site | None:
        """Returns the site at an address, or `None` if there is none."""
        return self._by_address.get(address)

    def site_of_key(self, key: str) -> Site:
        """Returns the site with an operand, or a result, of this key."""
        return self._by_key[key]

    def name_at(self, address: Address) -> str | None:
        """Returns the name of the contraction at an address, or `None` if there is none that the
        transforms look into. A skipped contraction is named by its index among those.
        """
        return self._names.get(address)

    def name_of_skipped(self, index: int) -> str:
        """Returns the name of a contraction that stays in float."""
        return f"{self.skipped[index].path}:{self.skipped[index].op}~{index}"

    def label_of_skipped(self, index: int) -> str:
        """Returns what tables call a contraction that stays in float; see `Site.label`."""
        return label_of(self.skipped[index].path, self.name_of_skipped(index), is_weight=False)

    def has_sites_in(self, address: Address) -> bool:
        """Whether there is a site inside an equation."""
        return address in self._around

    def keys_in(self, address: Address) -> frozenset[str]:
        """Returns the keys of the operands and results of the sites inside an equation."""
        return frozenset(self._around.get(address, ()))

    @functools.cached_property
    def _by_address(self) -> dict[Address, Site]:
        return {site.address: site for site in self.sites}

    @functools.cached_property
    def _names(self) -> dict[Address, str]:
        names = {skip.address: self.name_of_skipped(i) for i, skip in enumerate(self.skipped)}
        names.pop((), None)
        return names | {site.address: site.name for site in self.sites}

    @functools.cached_property
    def _by_key(self) -> dict[str, Site]:
        return {key: site for site in self.sites for key in site.keys}

    @functools.cached_property
    def _around(self) -> dict[Address, list[str]]:
        """The keys inside each address above a site."""
        around: dict[Address, list[str]] = {}
        for site in self.sites:
            for depth in range(len(site.address)):
                around.setdefault(site.address[:depth], []).extend(site.keys)
        return around

    def weight_at(self, path: str | None) -> Weight | None:
        """Returns the weight with a path, or `None` if it is not quantized."""
        return self._weights.get(path)

    def weights_in(self, site: Site) -> tuple[str, ...]:
        """Returns the paths of the weights that a site multiplies by; if several are joined, all of
        them, in the order of `weights`.
        """
        paths = tuple(x.path for x in site.operands if x.path is not None)
        if not paths or site.path in paths:
            return paths
        joined = f"+{site.path}+"
        return tuple(x.path for x in self.weights if f"+{x.path}+" in joined)

    @functools.cached_property
    def _weights(self) -> dict[str | None, Weight]:
        return {weight.path: weight for weight in self.weights}

    def split_of(self, path: str | None) -> Split | None:
        """Returns the split of the parameter with a path, or `None` if it is not split."""
        return self._splits.get(path)

    def whole_of(self, path: str) -> str:
        """Returns the path of the weight that a path is a part of, or the path itself."""
        return self._wholes.get(path, path)

    @functools.cached_property
    def _splits(self) -> dict[str | None, Split]:
        return {split.path: split for split in self.splits}

    @functools.cached_property
    def _wholes(self) -> dict[str, str]:
        return {part.path: part.whole for split in self.splits for part in split.parts}

    def check_parameters(self, function: str, lines: Sequence[str]) -> None:
        """Raises if parameters are not those that the plan was made for."""
        contractions = [line for line in self.signature if not is_parameter_line(line)]
        check_same(function, (*lines, *contractions), self.signature)

    def check_affines(
        self, function: str, affines: Mapping[str, Affine] | None
    ) -> dict[str, Affine]:
        """Returns the given scales, or an empty dict for `None`. Raises if the plan does not have
        one of them, or if the scale of a static activation or output is missing.
        """
        if affines is None:
            return {}
        fix = "compute it with jqx.affines(plan, stats)."
        if not isinstance(affines, Mapping):
            if isinstance(affines, tuple):
                fix = "take the statistics, out, stats = jqx.calibrate(f, plan)(params, x), and "
                fix += "pass jqx.affines(plan, stats)."
            elif function != "quantize_params" and not isinstance(affines, (str, list)):
                fix = f"arguments of f come second: jqx.{function}(f, plan, affines)(params, x)."
            details = repr(affines) if isinstance(affines, str) else f"a {type(affines).__name__}"
            problem = "`affines` is not a dict of scales."
            raise fail(function, problem, given=details, fix=fix, error=TypeError)
        specs = self.static_specs()
        weights = {weight.key: weight.spec for weight in self.weights}
        unknown, missing = sorted({*affines} - {*specs, *weights}), sorted({*specs} - {*affines})
        if unknown or missing:
            problem = "`affines` does not fit the plan."
            details = f"{len(affines)} entries; unknown: {some(unknown)}; missing: {some(missing)}"
            raise fail(function, problem, given=details, fix=fix)
        for key, affine in affines.items():
            _check_affine(function, key, affine, specs.get(key) or weights[key])
            if key in specs:
                _check_rank(function, key, affine[0], self.site_of_key(key))
        return dict(affines)

    def scales_of(self, function: str, affines: GivenAffines) -> dict[str, Affine]:
        """Returns the scales that a function runs with: those given, which must be complete, or
        none for `"dynamic"`, which computes every scale from the current values.
        """
        if isinstance(affines, str) and affines == "dynamic":
            return {}
        scales = self.check_affines(function, affines)
        if missing := sorted({*self.static_specs()} - {*scales}):
            problem = "static activations or outputs have no scale."
            details = f"affines == None; without a scale: {some(missing)}"
            fix = "pass affines=jqx.affines(plan, jqx.calibrate_batches(f, plan, params, "
            fix += 'batches)), or affines="dynamic" to compute every scale from the current values.'
            raise fail(function, problem, given=details, fix=fix)
        return scales

    def table(self) -> Table:
        """Returns the rows as text; what stays in float is dimmed if the output supports it."""
        rows = tuple(_rows(self))
        return Table(HEAD, rows, _footer(self), texts=len(HEAD), bright=len(self.sites))


# A plan as a table: every contraction, how it is quantized, or why it is not.


_WIDTHS = (60, 24, 48, 48, 64, 160)
"""The largest width of each column of `HEAD` in characters; longer cells are cut."""

_MOST = 8
"""The largest number of parameters that no contraction reads in the table."""

HEAD = ("path", "op", "shapes", "weight", "activation", "rule")


def _rows(plan: Any) -> list[tuple[str, ...]]:
    rows = []
    for site in plan.sites:
        activation = _specs(site, "activation", plan) + (
            f" -> {site.output}" if site.output else ""
        )
        weight, shapes = _specs(site, "weight", plan), _shapes(site.shapes)
        note = "" if site.codes is None else f"; takes the codes of its {site.codes}"
        rows.append((site.label, site.op, shapes, weight, activation, f"{site.rule}{note}"))
    for i, skip in enumerate(plan.skipped):
        path = plan.label_of_skipped(i)
        rows.append((path, skip.op, _shapes(skip.shapes), "-", "-", skip.reason))
    for item in plan.unreached[:_MOST]:
        path = item.path or "(argument)"
        rows.append((path, "(none)", _shapes((item.shape,)), "-", "-", item.reason))
    if (hidden := len(plan.unreached) - _MOST) > 0:
        rows.append((f"and {hidden} more", "(none)", "-", "-", "-", "no contraction reads them"))
    return [tuple(map(_cut, row, _WIDTHS)) for row in rows]


def _cut(text: str, width: int) -> str:
    """Returns a cell of at most a width; a longer text keeps its beginning and its end."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[-end:]}"


def _footer(plan: Any) -> str:
    count = len(plan.sites) + len(plan.skipped)
    tied = [f"{w.path} ({w.sites} sites)" for w in plan.weights if w.sites > 1]
    shared = f"; one tensor for {some(tied)}" if tied else ""
    convolved = {s.path for s in plan.sites if s.op == "conv_general_dilated"}
    kept = [w for w in plan.weights if {-1, -2} & {*w.moved} and w.path not in convolved]
    moved = [w.path or "(argument)" for w in kept]
    order = f"; codes of {some(moved)} stay in order, as f moves its axes" if moved else ""
    first = f"{len(plan.sites)} of {count} contractions quantized{_share(plan)}{shared}{order}"
    rules = {site.rule: site.products for site in plan.sites if site.products is not None}
    lines = [f"rule {i}  {x}" for i in sorted(rules) for x in str(rules[i]).splitlines()]
    return "\n".join([first, *lines])


def _share(plan: Any) -> str:
    """Returns the quantized share of the multiply-adds, in words; empty if sizes are symbolic."""
    macs = [item.macs for item in (*plan.sites, *plan.skipped)]
    counts = [number for number in macs if number is not None]
    if not sum(counts) or len(counts) < len(macs):
        return ""
    return f", {100 * sum(counts[: len(plan.sites)]) / sum(counts):.1f} % of the multiply-adds"


def _specs(site: Any, role: str, plan: Any) -> str:
    specs = []
    for operand in site.operands:
        if operand.role == role:
            weight = plan.weight_at(operand.path) if role == "weight" else None
            spec = weight.spec if weight and operand.spec else operand.spec
            specs.append(str(spec) if spec else "float")
    return " x ".join(dict.fromkeys(specs)) or "-"


def _shapes(shapes: tuple[tuple[int | str, ...], ...]) -> str:
    return " x ".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes)


# Checks of `affines=` against the plan, before anything is traced.


def _check_affine(function: str, key: str, affine: Any, spec: QSpec) -> None:
    """Checks the type and the dtypes of a scale and zero point, and that they fit each other."""
    form = format_of(spec.qtype)
    fix = "compute it with jqx.affines(plan, stats), or pass arrays like its arrays."
    problem, wrong = f"`affines[{key!r}]` is not a scale and zero point.", affine
    if not isinstance(affine, Affine) and hasattr(affine, "_fields"):
        fix = "these are statistics: pass jqx.affines(plan, stats)."
    elif isinstance(affine, (tuple, list)) and len(affine) == 2:
        scale, zero_point = affine
        dtype = getattr(scale, "dtype", None)
        if dtype is None or not (name_of(dtype) in FLOATS or dtype == E8M0):
            problem, wrong = f"the scale of {key!r} is not an array of floats.", scale
        elif zero_point is None:
            return
        elif isinstance(form, Integer) and getattr(zero_point, "dtype", None) == form.storage:
            return check_zero_point(function, zero_point, scale)
        else:
            problem = f"the zero point of {key!r} does not hold codes of {form.name}."
            wrong = zero_point
    dtype = getattr(wrong, "dtype", None)
    details = f"dtype {name_of(dtype)}" if dtype else f"a {type(wrong).__name__}"
    raise fail(function, problem, given=details, fix=fix, error=TypeError)


def _check_rank(function: str, key: str, scale: Any, site: Any) -> None:
    steps = tuple(loop.length for loop in site.loops)
    rank = len(steps) + len(site.scale_shape(key))
    if scale.ndim != rank or scale.shape[: len(steps)] != steps:
        problem = f"the scale of {key!r} does not have the axes of its array."
        details = f"scale.shape == {tuple(scale.shape)}"
        expected = f"{rank} axes" + (f", the first of sizes {steps}" if steps else "")
        fix = "give it size 1 along the axes that share a scale."
        raise fail(function, problem, given=details, expected=expected, fix=fix)


def check_sums(
    function: str,
    site: Site,
    kept_axes: Sequence[Sequence[int]],
    shapes: Sequence[Any],
    affines: Mapping[str, Affine],
) -> None:
    """Checks that no scale of an activation has an entry for each index that its contraction sums
    over, which could not be moved out of the sum. `kept_axes` are those that the result keeps.
    """
    for operand, axes, shape in zip(site.operands, kept_axes, shapes, strict=False):
        if operand.role != "activation" or operand.spec is None or operand.key not in affines:
            continue
        scale = tuple(affines[operand.key][0].shape)
        pairs = enumerate(zip(scale, shape, strict=False))
        summed = [axis for axis, (m, n) in pairs if axis not in axes and m != 1 and m == n]
        planned = operand.spec.granularity.scale_shape(shape) if summed else ()
        if summed := [axis for axis in summed if scale[axis] != planned[axis]]:
            problem = f"the scale of {operand.key!r} varies along a contracted axis: it cannot be "
            problem += "moved out of the sum."
            details = f"scale {scale} for an operand of shape {tuple(shape)}, axes {summed}"
            fix = "reduce the scale along these axes, or compute it by jqx.affines(plan, stats)."
            raise fail(function, problem, given=details, fix=fix)
