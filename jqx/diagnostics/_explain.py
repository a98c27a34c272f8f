"""`explain`: the compiled contraction of each site, and whether it runs on codes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.tree_util import keystr

from .._calls import called
from .._errors import fail
from .._table import Table, Tabular
from ..policy import Policy
from ..tensor import QTensor, pack_for
from ..transforms import Plan, convert, make_plan, quantize_params
from ..transforms._shared import (
    GivenAffines,
    check_plan,
    is_array,
    label_of,
    lay_out_weights,
    rooted,
)
from ._contraction import Contraction
from ._hlo import CODES
from ._lowering import Lowering, lowering
from ._lowering_table import multiplied, remarks, text_table
from ._schemes import scheme_of_site, scheme_of_tensor
from ._targets import target_of

HEAD = ("site", "plan", "really", "multiplies", "runs", "times", "remarks")

GONE = (
    "gone: the program has no such product: it was merged with an equal one, made of other "
    "operations, or computed beforehand"
)

Really = Literal["codes", "converted", "widened first", "float", "lookup", "gone"]


@dataclass(frozen=True)
class Explained:
    """One contraction of a function, and its compiled form.

    Attributes:
      path: path of its weight, or its name scope.
      op: the operation, such as `dot_general`.
      plan: how the plan quantizes it, operand by operand, or why it stays in float; for a weight
        that was a QTensor already, which the plan does not change, its format.
      really: what the compiled program does:

        - `"codes"`: codes are multiplied by codes
        - `"converted"`: the kernel reads codes, and converts them before it multiplies them
        - `"widened first"`: another kernel writes the codes to memory in a wider type
        - `"float"`: no codes are read
        - `"lookup"`: rows of a table are read; nothing is multiplied
        - `"gone"`: the program has no contraction of that name: the compiler merged it with an
          equal one, made it of other operations, or computed it beforehand, or jqx does not look
          where it is
      contractions: its compiled contractions; several if one product is computed in parts.
      label: what tables call it; if empty, its path.
    """

    path: str
    op: str
    plan: str
    really: Really
    contractions: tuple[Contraction, ...]
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.path

    @property
    def is_quantized(self) -> bool:
        """Whether its kernels read codes."""
        return self.really in ("codes", "converted")


@dataclass(frozen=True)
class Explanation(Tabular):
    """The compiled form of each contraction of a function. Prints as a table.

    Attributes:
      sites: the sites of the plan, skipped ones last; without a plan, those that a function from
        `jqx.convert` names.
      others: contractions of the program that belong to no site.
      lowering: the whole program.
      plain: paths of quantized weights that are not in the layout that the target contracts
        fastest; `quantize_params(..., target=)` and `pack_for` convert them.
    """

    sites: tuple[Explained, ...]
    others: tuple[Contraction, ...]
    lowering: Lowering
    plain: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> tuple[Explained, ...]:
        """Returns the contractions on a path, in order; an empty tuple if there are none."""
        return tuple(site for site in self.sites if site.path == path)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`."""
        return {
            "target": self.lowering.target,
            "sites": [
                {
                    "path": site.path,
                    "op": site.op,
                    "plan": site.plan,
                    "really": site.really,
                    "contractions": [c.to_dict() for c in site.contractions],
                }
                for site in self.sites
            ],
            "others": [c.to_dict() for c in self.others],
            "plain": list(self.plain),
        }

    def table(self) -> Table:
        """Returns the rows as text."""
        return text_table(HEAD, _rows(self), _footer(self))


@called("explain", "pass the function and its arguments: jqx.explain(f, params, x, plan=plan).")
def explain(
    f: Callable[..., Any],
    *args: Any,
    plan: Plan | Policy | None = None,
    affines: GivenAffines = None,
    target: str = "cpu",
) -> Explanation:
    """Compiles a quantized function, and reports what each of its sites multiplies, and how.

    It also reports how many weights the target would read faster in another layout, made by
    `jqx.quantize_params(..., target=)` or `jqx.pack_for`: weights in the layout of files, and
    weights packed for a kernel of another platform, which the target does not run.

    With a plan, `f` is the float function. `jqx.convert(f, plan, affines)` is compiled, with its
    weights quantized outside (float weights in `args` are replaced by the results of
    `quantize_params`). Without a plan, `f` itself is compiled; then only sites of functions from
    `jqx.convert` have names.

    Args:
      f: a function of arrays and pytrees of arrays.
      *args: its arguments, as for `jqx.lowering`: any shapes and dtypes; arrays, QTensors or
        `jax.ShapeDtypeStruct`.
      plan: a `Plan`, or a `Policy` to plan the call with.
      affines: scales from `jqx.affines`; without them the program computes the scale of every
        activation from its values.
      target: as in `jqx.lowering`.

    Raises:
      TypeError: if `plan` is not a plan.
      ValueError: if the plan does not fit, the target is unknown, or `affines` is passed without a
        plan.
      ImportError, RuntimeError: as in `jqx.lowering`.

    Gradient: none; nothing is computed. NaN and infinity: the same.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda p, x: (x @ p["w"]) @ p["v"]
      >>> params = {"w": jnp.ones((256, 512)), "v": jnp.ones((512, 256))}
      >>> policy = jqx.presets.w8a8_dynamic("w")
      >>> found = jqx.explain(f, params, jnp.ones((32, 256)), plan=policy)
      >>> [(site.path, site.really) for site in found.sites]
      [('w', 'codes'), ('v', 'float')]
      >>> found["v"][0].plan
      'left in float: no rule matches'
    """
    if plan is None:
        if affines is not None:
            raise fail(
                "explain",
                "`affines` has no use without a plan.",
                given="affines, and plan == None",
                expected="the plan that these scales belong to",
                fix="pass plan=, or only the converted function.",
            )
        low = lowering(f, *args, target=target)
        return _without_plan(low, _plain(args, target))
    check_plan("explain", plan, order="explain(f, *args, plan=plan)", policies=True)
    known = make_plan(f, plan)(*args) if isinstance(plan, Policy) else plan
    quantized = _with_codes(args, known)
    return _with_plan(
        lowering(
            convert(f, known, "dynamic" if affines is None else affines), *quantized, target=target
        ),
        known,
        _plain(_planned(quantized, known, target), target),
        _already(args, known),
    )


def _plain(args: Any, target: str) -> tuple[str, ...]:
    """Returns the paths of QTensors that would have another layout if packed for a target."""
    target_of("explain", target)
    flat, _ = jax.tree_util.tree_flatten_with_path(args, is_leaf=_is_quantized)
    return tuple(
        keystr(path[1:], simple=True, separator="/")
        for path, q in flat
        if _is_quantized(q) and pack_for(q, target).layout != q.layout
    )


def _planned(args: Sequence[Any], plan: Plan, target: str) -> list[Any]:
    """Returns the arguments without the weights that quantize_params would leave as they are for a
    target, because of their views.
    """
    places = (plan.params,) if isinstance(plan.params, int) else plan.params
    params = args[plan.params] if isinstance(plan.params, int) else tuple(args[i] for i in places)
    given = list(args)
    laid_out = lay_out_weights(params, plan, target)
    for i, own in zip(
        places, (laid_out,) if isinstance(plan.params, int) else laid_out, strict=True
    ):
        given[i] = jax.tree.map(_unless_same, args[i], own, is_leaf=_is_quantized)
    return given


def _unless_same(x: Any, laid_out: Any) -> Any:
    same = _is_quantized(x) and _is_quantized(laid_out) and x.layout == laid_out.layout
    return None if same else x


def _already(args: Any, plan: Plan) -> dict[str, str]:
    """Returns the schemes of the given QTensors that the plan does not quantize, by path."""
    places = plan.params
    own = args[places] if isinstance(places, int) else [args[i] for i in places]
    tree = rooted(places, own)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantized)
    found = {keystr(path, simple=True, separator="/"): q for path, q in flat if _is_quantized(q)}
    planned = {operand.path for site in plan.sites for operand in site.operands}
    return {path: scheme_of_tensor(q) for path, q in found.items() if path not in planned}


def _with_codes(args: tuple[Any, ...], plan: Plan) -> list[Any]:
    """Returns the arguments with the weights of a plan as abstract QTensors."""
    given = list(args)
    places = (plan.params,) if isinstance(plan.params, int) else plan.params
    leaves = jax.tree.leaves([given[i] for i in places], is_leaf=_is_quantized)
    if any(map(_is_quantized, leaves)):
        return given
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x,
        tuple(given[i] for i in places),
    )
    made = quantize_params(shapes[0] if isinstance(plan.params, int) else shapes, plan)
    for i, params in zip(places, (made,) if isinstance(plan.params, int) else made, strict=True):
        given[i] = params
    return given


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)


def _with_plan(
    low: Lowering, plan: Plan, plain: tuple[str, ...], already: Mapping[str, str]
) -> Explanation:
    found = _by_site(low)
    sites = []
    for site in plan.sites:
        parts = tuple(found.pop(site.name, ()))
        specs = scheme_of_site(site)
        really = _really(site.op, parts)
        sites.append(Explained(site.path, site.op, specs, really, parts, site.label))
    for i, skip in enumerate(plan.skipped):
        parts = tuple(found.pop(plan.name_of_skipped(i), ()))
        reason = f"left in float: {skip.reason}"
        if skip.path in already:
            reason = f"quantized already: {already[skip.path]}"
        really, label = _really(skip.op, parts), plan.label_of_skipped(i)
        sites.append(Explained(skip.path, skip.op, reason, really, parts, label))
    others = tuple(c for parts in found.values() for c in parts)
    return Explanation(tuple(sites), others, low, plain)


def _without_plan(low: Lowering, plain: tuple[str, ...]) -> Explanation:
    found = _by_site(low)
    others = tuple(found.pop("", ()))
    sites = []
    for name, parts in found.items():
        path, _, op = name.rpartition(":")
        op = op.partition("#")[0].partition("~")[0]
        label = label_of(path, name, is_weight=False)
        sites.append(Explained(path, op, "", _really(op, tuple(parts)), tuple(parts), label))
    return Explanation(tuple(sites), others, low, plain)


def _by_site(low: Lowering) -> dict[str, list[Contraction]]:
    found: dict[str, list[Contraction]] = {}
    for contraction in low.contractions:
        found.setdefault(contraction.site, []).append(contraction)
    return found


def _really(op: str, contractions: tuple[Contraction, ...]) -> Really:
    """Returns what a site does, from its contractions that read codes; others sum scales."""
    if not contractions:
        return "lookup" if op == "gather" else "gone"
    if any(c.widened for c in contractions):
        return "widened first"
    reached = [c for c in contractions if any(map(_are_codes, (c.dtypes, *c.reads)))]
    if not reached:
        return "float"
    return "codes" if all(map(_multiplies_codes, reached)) else "converted"


def _multiplies_codes(c: Contraction) -> bool:
    """Returns whether both operands are codes; or integers, or elements read as codes, if no
    product for matrices runs.
    """
    kinds = zip(c.dtypes, c.reads, strict=True)
    if "by elements" in c.runs:
        return all(_are_codes((dtype, *reads)) or dtype[0] in "su" for dtype, reads in kinds)
    return all(_are_codes((dtype,)) for dtype in c.dtypes)


def _are_codes(dtypes: tuple[str, ...]) -> bool:
    return any(CODES.fullmatch(dtype) for dtype in dtypes)


def _rows(explanation: Explanation) -> list[tuple[str, ...]]:
    rows = []
    for site in explanation.sites:
        head = (site.name, site.plan or "-", site.really)
        parts = [_cells(c) for c in site.contractions] or [("-", "-", "-", "")]
        rows += [(*head, *parts[0]), *(("", "", "", *part) for part in parts[1:])]
    rows += [("(no site)", "-", "-", *_cells(c)) for c in explanation.others]
    return rows


def _cells(c: Contraction) -> tuple[str, ...]:
    return multiplied(c), c.runs, "?" if c.times is None else str(c.times), remarks(c)


def _footer(explanation: Explanation) -> str:
    done = sum(site.is_quantized for site in explanation.sites)
    count = len(explanation.sites)
    text = f"{done} of {count} contractions read codes on {explanation.lowering.target}"
    if any(site.really == "gone" for site in explanation.sites):
        text += f"\n{GONE}"
    if not explanation.plain:
        return text
    layouts = (
        f"{len(explanation.plain)} weights are not in the layout that the target reads fastest: "
    )
    return f"{layouts}target= of quantize_params, or pack_for, converts them\n{text}"
