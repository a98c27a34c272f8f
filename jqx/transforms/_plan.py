"""Plan: every contraction of a function, and how it is quantized. A static, hashable value."""

import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._added import added
from .._errors import fail, nesting
from .._table import Table, Tabular
from ..calibrators import Affine
from ..tensor import QSpec, Segments
from ..tensor._shared import (
    NONE,
    Lazy,
    Values,
    check_values,
    check_version,
    lazy_segments,
    record_from_json,
    to_json,
)
from ._affines import GivenAffines, check_affines, required_affines, some
from ._origin import Address
from ._paths import Hoisting, Params, Split, Weights, flatten, is_whole, rooted
from ._plan_table import plan_table
from ._signature import check_same, is_parameter_line
from ._site import Site, Skipped, Unreached, Weight, label_of
from ._split import parts_of

_VERSION = 1
"""The version of the format that `to_dict` writes."""


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

    @property
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
        found = tuple(item for item in (*self.sites, *self.skipped) if item.path == path)
        if not found:
            known = list(dict.fromkeys(item.path for item in (*self.sites, *self.skipped)))
            close = difflib.get_close_matches(str(path), known) or known
            raise fail(
                "Plan",
                "no contraction has that path.",
                given=repr(path),
                expected=f"one of {len(known)} paths, such as {some(close)}",
                fix="print the plan: it lists every path.",
                error=KeyError,
            )
        return found

    def to_dict(self, values: Values = NONE) -> dict[str, Any]:
        """Returns the plan as a dict for `json.dumps`: jqx's own values by public name and fields.

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
        return {"version": _VERSION, **to_json("Plan.to_dict", self, Plan, values)}

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
        fields = check_version("Plan.from_dict", data, _VERSION)
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
        own = rooted(self.params, params)
        flat = flatten(own)
        names = self.parameters.name("Plan.map_weights", [keys for keys, _ in flat])

        def mapped_at(path: str | None, leaf: Any) -> Any:
            weight = self.weight_at(path)
            return leaf if weight is None else f(weight, leaf)

        leaves = []
        for name, (_, leaf) in zip(names, flat, strict=True):
            split = self.split_of(name)
            if split is None or not any(self.weight_at(part.path) for part in split.parts):
                leaves.append(mapped_at(name, leaf))
                continue
            parts = parts_of("Plan.map_weights", leaf, split)
            mapped = [mapped_at(own.path, x) for own, x in zip(split.parts, parts, strict=True)]
            is_lazy = all(isinstance(x, Lazy) for x in mapped)
            leaves.append((lazy_segments if is_lazy else Segments)(mapped, split.axis))
        mapped = jax.tree.unflatten(jax.tree.structure(own, is_leaf=is_whole), leaves)
        if isinstance(self.params, int):
            return mapped
        return tuple(mapped[place] for place in self.params)

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

    def has_sites_in(self, here: Address) -> bool:
        """Whether there is a site inside an equation."""
        return here in self._around

    def keys_in(self, here: Address) -> frozenset[str]:
        """Returns the keys of the operands and results of the sites inside an equation."""
        return frozenset(self._around.get(here, ()))

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
        own = tuple(x.path for x in site.operands if x.path is not None)
        if not own or site.path in own:
            return own
        joined = f"+{site.path}+"
        return tuple(x.path for x in self.weights if f"+{x.path}+" in joined)

    @functools.cached_property
    def _weights(self) -> dict[str | None, Weight]:
        return {weight.path: weight for weight in self.weights}

    def split_of(self, path: str | None) -> Split | None:
        """Returns the split of the parameter with a path, or `None` if it is not split."""
        return next((split for split in self.splits if split.path == path), None)

    def whole_of(self, path: str) -> str:
        """Returns the path of the weight that a path is a part of, or the path itself."""
        return self._wholes.get(path, path)

    @functools.cached_property
    def _wholes(self) -> dict[str, str]:
        return {part.path: part.whole for split in self.splits for part in split.parts}

    def check_signature(self, function: str, signature: tuple[str, ...]) -> None:
        """Raises if a function is not the one that the plan was made for."""
        check_same(function, signature, self.signature)

    def check_parameters(self, function: str, lines: Sequence[str]) -> None:
        """Raises if parameters are not those that the plan was made for."""
        rest = [line for line in self.signature if not is_parameter_line(line)]
        self.check_signature(function, (*lines, *rest))

    def check_affines(
        self, function: str, affines: Mapping[str, Affine] | None
    ) -> dict[str, Affine]:
        """Returns the given scales, or an empty dict for `None`. Checks that the plan has each of
        them, and that the scale of no static activation or output is missing.
        """
        return check_affines(function, self, affines)

    def scales_of(self, function: str, affines: GivenAffines) -> dict[str, Affine]:
        """Returns the scales that a function runs with: those given, which must be complete, or
        none for `"dynamic"`, which computes every scale from the current values.
        """
        return required_affines(function, self, affines)

    def table(self) -> Table:
        """Returns the rows as text."""
        return plan_table(self)
