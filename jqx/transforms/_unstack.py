"""`unstack`: a function in which the parts of split weights are parameters of their own."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..tensor import QTensor, Segments
from ..tensor._shared import Lazy, lazy_segments
from ._paths import Split, flatten, is_whole, rooted
from ._plan import Plan
from ._signature import is_parameter_line, line_of, parameter_of
from ._split import evaluated, parts_of
from ._trace import TracedOnce, trace_call


@dataclasses.dataclass(frozen=True, eq=False)
class Unstacked:
    """A function whose plan splits weights, as a function of their parts.

    In `params` a tuple of its parts takes the place of each weight that is split. Each part is an
    ordinary parameter, whose path in `plan` is such as `layers/w[0:1]`. So algorithms need to know
    nothing of parts.

    Attributes:
      stacked: the plan of the function of whole weights.
      given: its parameters.
      f: the function, if that of parts is needed.
    """

    stacked: Plan
    given: Any
    f: TracedOnce | None = None

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of `function`: the same sites, and no splits."""
        own = {name: path for path, name in self.stacked.names}
        names, lines = dict(self.stacked.names), []
        for split in self.stacked.splits:
            path = own.get(split.path, split.path)
            names.pop(path, None)
            for i, part in enumerate(split.parts):
                names[f"{path}/{i}" if path else str(i)] = part.path
        for line in self.stacked.signature:
            lines += _lines_of_parts(line, self._splits) if is_parameter_line(line) else [line]
        return dataclasses.replace(
            self.stacked, names=tuple(names.items()), signature=tuple(lines), splits=()
        )

    @functools.cached_property
    def params(self) -> Any:
        """The parameters of `function`."""
        if not self.stacked.splits:
            return self.given
        parts = [
            leaf if split is None else tuple(parts_of("ptq", leaf, split))
            for leaf, split in zip(self._leaves, self._of_leaves, strict=True)
        ]
        return self._unrooted(parts)

    def function(self, *args: Any, **kwargs: Any) -> Any:
        """The function of parts."""
        places = self.stacked.params
        positions = (places,) if isinstance(places, int) else places
        params = args[places] if isinstance(places, int) else tuple(args[i] for i in places)
        whole = self.together(params, joins=False)
        values = dict(zip(positions, (whole,) if isinstance(places, int) else whole, strict=True))
        args = tuple(values.get(i, x) for i, x in enumerate(args))
        assert self.f is not None
        call = trace_call("ptq", self.f, self.stacked.parameters, args, kwargs)
        results = evaluated("ptq", call.jaxpr, call.consts, call.leaves)
        return jax.tree.unflatten(call.out_tree, results)

    def together(self, params: Any, *, joins: bool = True) -> Any:
        """Returns parameters with whole weights: `Segments` where a part is quantized, and where
        none is an array, or with `joins=False` `Segments` too.
        """
        if not self.stacked.splits:
            return params
        each = self._tree.flatten_up_to(rooted(self.stacked.params, params))
        before = self._tree.flatten_up_to(rooted(self.stacked.params, self.params))
        leaves = []
        for own, parts, old, split in zip(self._leaves, each, before, self._of_leaves, strict=True):
            if split is None:
                leaves.append(parts)
            elif all(a is b for a, b in zip(parts, old, strict=True)):
                leaves.append(own)
            elif all(isinstance(x, Lazy) for x in parts):
                leaves.append(lazy_segments(parts, split.axis))
            elif joins and not any(isinstance(x, QTensor) for x in parts):
                leaves.append(jnp.concatenate(parts, split.axis))
            else:
                leaves.append(Segments(parts, split.axis))
        return self._unrooted(leaves)

    @functools.cached_property
    def _splits(self) -> dict[str, Split]:
        return {split.path: split for split in self.stacked.splits}

    @functools.cached_property
    def _tree(self) -> Any:
        return jax.tree.structure(rooted(self.stacked.params, self.given), is_leaf=is_whole)

    @functools.cached_property
    def _leaves(self) -> list[Any]:
        return [leaf for _, leaf in flatten(rooted(self.stacked.params, self.given))]

    @functools.cached_property
    def _of_leaves(self) -> list[Split | None]:
        """The split of each leaf."""
        keys = [keys for keys, _ in flatten(rooted(self.stacked.params, self.given))]
        names = self.stacked.parameters.name("ptq", keys)
        return [None if name is None else self._splits.get(name) for name in names]

    def _unrooted(self, leaves: list[Any]) -> Any:
        """Returns parameters with other leaves, as an algorithm gets them."""
        tree = jax.tree.unflatten(self._tree, leaves)
        places = self.stacked.params
        return tree if isinstance(places, int) else tuple(tree[i] for i in places)


def _lines_of_parts(line: str, splits: dict[str, Split]) -> list[str]:
    """Returns the line of a parameter, or those of its parts."""
    path, dtype, shape = parameter_of(line) if splits else (line, "", ())
    split = splits.get(path)
    if split is None:
        return [line]
    parts = parts_of("ptq", jax.ShapeDtypeStruct(shape, bool), split)  # only shapes matter
    return [line_of(x.path, dtype, own.shape) for x, own in zip(split.parts, parts, strict=True)]
