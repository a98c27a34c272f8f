"""The sites and the parameters of a function, by their names in a plan."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from .._errors import fail
from ..transforms import Plan, Site, Weight
from ..transforms._shared import Unstacked, is_array


class Step(Protocol):
    """A site in one step of the scans around it, and the index of the leaf of its weight."""

    @property
    def site(self) -> Site: ...
    @property
    def place(self) -> int: ...


class Named:
    """The sites and the parameters of a function.

    Args:
      plan: a plan of the function.
      names: the name of each leaf of its arguments, `None` if it is not a parameter.
    """

    def __init__(self, plan: Plan, names: Sequence[str | None]):
        self.plan = plan
        self.names: list[str] = [str(name) for name in names]
        self._places = [i for i, name in enumerate(names) if name is not None]

    @property
    def sites(self) -> list[Site]:
        """The sites of the plan that multiply a weight by something else."""
        kinds = {True, False}
        return [x for x in self.plan.sites if {o.path is None for o in x.operands} == kinds]

    def site(self, visit: Step) -> Site:
        """The site of the plan; for one that the plan leaves in float, that of the full plan."""
        return self.plan.site_at(visit.site.address) or visit.site

    def key(self, visit: Step) -> str:
        """The name of the operand that a site multiplies its weight by."""
        return next(x.key for x in self.site(visit).operands if x.path is None)

    def name(self, visit: Step) -> str:
        """The name of a site."""
        return self.site(visit).name

    def weight(self, visit: Step) -> Weight | None:
        """Returns the weight of a site if the plan quantizes it."""
        return self.plan.weight_at(self.names[visit.place])

    def leaves(self, params: Any) -> dict[int, Any]:
        """Returns the leaves of parameters by index, as in `Visit.place`."""
        apart = Unstacked(self.plan, params).params
        leaves = [x for tree in self._trees(apart) for x in jax.tree.leaves(tree) if is_array(x)]
        if len(leaves) != len(self._places):
            raise fail(
                "Quantized.basis",
                "the parameters do not have the leaves of those that were quantized.",
                given=f"{len(leaves)} arrays",
                expected=f"{len(self._places)} arrays, as quantized.params has",
                fix="pass the same parameters as to ptq. For nnx, keep streams of random numbers "
                "in "
                "the function: graph, streams, params = nnx.split(model, nnx.RngState, ...).",
            )
        return dict(zip(self._places, leaves, strict=True))

    def _trees(self, params: Any) -> list[Any]:
        """Returns the parameters of each position, in the order of the positions."""
        if isinstance(self.plan.params, int):
            return [params]
        return [params[i] for i in np.argsort(self.plan.params)]

    def with_leaves(self, params: Any, leaves: Mapping[int, Any]) -> Any:
        """Returns parameters with some leaves replaced."""
        rest, own = (leaves[place] for place in self._places), Unstacked(self.plan, params)
        trees = [
            jax.tree.map(lambda x: next(rest) if is_array(x) else x, tree)
            for tree in self._trees(own.params)
        ]
        if isinstance(self.plan.params, int):
            return own.together(trees[0])
        order = np.argsort(self.plan.params).tolist()
        return own.together(tuple(trees[order.index(i)] for i in range(len(trees))))
