"""`Unbound`: what `jqx.load` returns for a quantized function. Files do not store the function."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax import dtypes
from jax.tree_util import keystr, tree_flatten_with_path

from .._calls import called
from .._errors import fail
from .._signatures import R
from ..calibrators import Affine
from ..transforms import Plan
from ..transforms._shared import (
    Hoisted,
    Maps,
    check_operations,
    is_array,
    is_quantized,
    placed,
    plan_of_function,
)
from ._basis import Basis
from ._hoisted import without_values
from ._late_folders import diagnostics
from ._mapped import Mapped, check_whole
from ._quantized import Quantized, quantized_of, summary
from ._target import Target, target_of


@dataclasses.dataclass(frozen=True, eq=False)
class Unbound:
    """A quantized function loaded from a file, without the function itself, which `bind` takes.

    Attributes:
      params: weights as QTensors, in the default layout, and the other parameters. If `structured`
        is false, a dict of the leaves by their paths.
      plan: as in `jqx.Quantized`; so are all attributes below but `structured`.
      affines: scales of activations, by key.
      report: error and size of each weight.
      inputs: shapes and dtypes of the first batch; `None` if files cannot store its containers or
        their contents.
      structured: whether `params` has the containers that the function takes. Files store dicts,
        lists and tuples of arrays. Of other pytrees they store only the leaves that are arrays.
      maps: channel maps at sites.
      parents: as in `jqx.Quantized`; `None` also if files cannot store their containers.
      basis: as in `jqx.Quantized`; `None` if an algorithm has changed what codes stand for.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> f, path = lambda w, x: x @ w, tempfile.mkdtemp() + "/model.safetensors"
      >>> x = jnp.ones((1, 4))
      >>> jqx.save(path, jqx.ptq(f, jqx.presets.w8a16(), progress=False)(jnp.eye(4), [x]))
      >>> quantized = jqx.load(path).bind(f)
      >>> quantized(x)
      Array([[1., 1., 1., 1.]], dtype=float32)
    """

    params: Any
    plan: Plan
    affines: Mapping[str, Affine]
    report: "diagnostics.Report"
    inputs: tuple[Any, ...] | None
    structured: bool = True
    maps: Maps = dataclasses.field(default_factory=dict)
    parents: tuple[Any, ...] | None = None
    basis: Basis | None = None

    @called("bind", "pass the function that was quantized: jqx.load(path).bind(f).")
    def bind(
        self,
        f: Callable[..., R],
        like: Any = None,
        *,
        target: Target = None,
        check: Literal["function"] | None = None,
    ) -> Quantized[..., R]:
        """Returns the quantized function of `f`: the same as the saved one, bit for bit.

        Args:
          f: the function that was quantized, or another one with the same parameters and
            contractions. Both are checked; `jax.jit` and `jax.checkpoint` around `f` or its parts
            make no difference. If the file was written with this version of jax, the
            names of its other operations are compared too, without their numbers and shapes; a
            difference is a warning.
          like: parameters with the structure that `f` takes: float, quantized or
            `jax.ShapeDtypeStruct`, such as `jax.eval_shape(init, key)`. Leaves that are not arrays
            are taken from it. Required if `structured` is false. If `hoist=` split the function,
            these are the parameters before that (a tuple if there are several positions), and they
            are required only if `parents` is `None`.
          target: the platform whose weight layout is used, as in `jqx.ptq`.
          check: `"function"` makes that difference an error, and also a file with which the names
            cannot be compared: of an older jqx, of another jax, or without `inputs`.

        Raises:
          TypeError: `f` is not a function.
          ValueError: `f` or `like` does not match what was quantized, `like` is required, `target`
            or `check` is unknown, or `check` finds other operations.
        """
        check_whole("bind", f)
        meant = target_of("bind", target)
        parents = self.parents
        if self.plan.hoisted is not None and not isinstance(f, Hoisted):
            if like is not None:
                parents = (like,) if isinstance(self.plan.hoisted.params, int) else tuple(like)
            f, like = without_values(self.plan, f, parents, self.inputs), None
        if check not in (None, "function"):
            raise fail(
                "bind",
                "`check` is unknown.",
                given=f"check == {check!r}",
                expected='"function", or None',
                fix='pass check="function", or leave it out.',
            )
        params = self.params if like is None and self.structured else self._filled(like)
        plan = self.plan
        if self.inputs is not None:
            fix = (
                "bind the function that was quantized. Another function of the same weights and "
                "contractions comes after it: jqx.load(path).bind(f).bind(step)."
            )
            given = placed(plan.params, params, self.inputs)
            plan, call = plan_of_function("bind", f, plan, given, fix)
            check_operations("bind", plan.operations, call.jaxpr, strict=check is not None)
        elif check is not None:
            check_operations("bind", "", None, strict=True)
        mapped = Mapped(f, plan, self.maps, self.basis)
        found = quantized_of(mapped, self.affines, params, self.report, self.inputs, meant)
        return found if parents is None else dataclasses.replace(found, parents=parents)

    def __repr__(self) -> str:
        return f"Unbound({summary(self.plan, self.report)})"

    def _repr_html_(self) -> str:
        return self.report.table().to_html(repr(self))

    def _filled(self, like: Any) -> Any:
        """Returns the parameters in the structure of `like`."""
        if like is None:
            raise fail(
                "bind",
                "the file does not hold the structure of the parameters.",
                given=f"{len(self.params)} leaves by path, and no `like`",
                expected="parameters with the structure that f takes, of any values; arrays may be "
                "jax.ShapeDtypeStruct",
                fix="pass it: jqx.load(path).bind(f, like=params).",
            )
        own = leaves_by_path(self.params) if self.structured else self.params
        flat, tree = tree_flatten_with_path(like, is_leaf=is_quantized)
        wanted = {_name(keys): x for keys, x in flat if is_array(x)}
        differ = [path for path in (*wanted, *own) if (path in wanted) != (path in own)]
        differ += [
            path for path in wanted if path in own and _kind(wanted[path]) != _kind(own[path])
        ]
        first = differ[0] if differ else ""
        if differ:
            raise fail(
                "bind",
                "`like` does not match the parameters in the file.",
                given=f"{first!r}: {_kind(wanted.get(first))}",
                expected=f"{first!r}: {_kind(own.get(first))}",
                fix="pass parameters with the structure that was quantized, of any values.",
            )
        return tree.unflatten([own[_name(keys)] if is_array(x) else x for keys, x in flat])


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the arrays and QTensors of a pytree, by path."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=is_quantized)
    named = [(_name(keys), leaf) for keys, leaf in flat if is_array(leaf)]
    twice = [path for path, n in Counter(path for path, _ in named).items() if n > 1]
    if twice:
        raise fail(
            "save",
            "two parameters have the same path.",
            given=f"{', '.join(map(repr, twice[:4]))} more than once",
            expected="parameters whose key paths, joined by '/', differ",
            fix="rename one: a key that contains '/' looks like a key inside another key.",
        )
    return dict(named)


def _name(keys: Any) -> str:
    return keystr(keys, simple=True, separator="/")


def _kind(x: Any) -> str:
    return "none" if x is None else f"{dtypes.canonicalize_dtype(x.dtype, True)}{list(x.shape)}"
