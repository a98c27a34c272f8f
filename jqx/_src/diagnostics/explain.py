"""`explain`: the compiled contraction of each site, and whether it runs on codes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
from jax.tree_util import keystr

from ..checks import called
from ..errors import fail
from ..policy import Policy
from ..table import Table, Tabular
from ..tensor.qtensor import QTensor
from ..tensor.shardings import pack_for
from ..transforms.arguments import check_plan
from ..transforms.convert import convert
from ..transforms.make_plan import make_plan
from ..transforms.paths import by_argument, insert_params
from ..transforms.plan import GivenAffines, Plan, label_of
from ..transforms.quantize_params import lay_out_weights, quantize_params
from ..transforms.trace import is_array, is_quantized
from .compare import params_and_others
from .hlo import CODES
from .lowering import Contraction, Lowering, lowering, multiplied, remarks, target_of
from .report import scheme_of, scheme_of_site

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
        sites = [asdict(site) for site in self.sites]
        for site in sites:
            del site["label"]
        return {
            "target": self.lowering.target,
            "sites": sites,
            "others": [c.to_dict() for c in self.others],
            "plain": list(self.plain),
        }

    def table(self) -> Table:
        """Returns the rows as text."""
        rows: list[tuple[str, ...]] = []
        for site in self.sites:
            parts = [_cells(c) for c in site.contractions] or [("-", "-", "-", "")]
            rows.append((site.name, site.plan or "-", site.really, *parts[0]))
            rows += (("", "", "", *part) for part in parts[1:])
        rows += (("(no site)", "-", "-", *_cells(c)) for c in self.others)
        codes = sum(site.is_quantized for site in self.sites)
        count, target = len(self.sites), self.lowering.target
        lines = [f"{codes} of {count} contractions read codes on {target}"]
        if self.plain:
            lines.insert(
                0,
                f"{len(self.plain)} weights are not in the layout that the target reads fastest: "
                "target= of quantize_params, or pack_for, converts them",
            )
        if any(site.really == "gone" for site in self.sites):
            lines.append(GONE)
        return Table(HEAD, tuple(rows), "\n".join(lines), texts=len(HEAD))


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
                fix="pass the plan that these scales belong to, or only the converted function.",
            )
        return _explained(lowering(f, *args, target=target), _plain(args, target), None)
    check_plan("explain", plan, order="explain(f, *args, plan=plan)", policies=True)
    if isinstance(plan, Policy):
        plan = make_plan(f, plan)(*args)
    params, others = params_and_others(plan, args)
    weights = _with_codes(params, plan)
    quantized = convert(f, plan, "dynamic" if affines is None else affines)
    program = lowering(quantized, *insert_params(plan.params, weights, others), target=target)
    # Weights that quantize_params would leave as they are for this target, because of their views.
    laid_out = lay_out_weights(weights, plan, target)

    def unless_same(x: Any, y: Any) -> Any:
        return None if is_quantized(x) and is_quantized(y) and x.layout == y.layout else x

    changed = jax.tree.map(unless_same, weights, laid_out, is_leaf=is_quantized)
    plain = _plain(insert_params(plan.params, changed, others), target)
    planned = {operand.path for site in plan.sites for operand in site.operands}
    leaves = _quantized_leaves(by_argument(plan.params, params))
    outside = {path: scheme_of(q) for path, q in leaves if path not in planned}
    return _explained(program, plain, _named_by(plan, outside))


def _plain(args: Any, target: str) -> tuple[str, ...]:
    """Returns the paths of QTensors that would have another layout if packed for a target."""
    target_of("explain", target)
    return tuple(
        path.partition("/")[2]
        for path, q in _quantized_leaves(args)
        if pack_for(q, target).layout != q.layout
    )


def _quantized_leaves(tree: Any) -> list[tuple[str, QTensor]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
    return [(keystr(path, simple=True, separator="/"), q) for path, q in flat if is_quantized(q)]


def _with_codes(params: Any, plan: Plan) -> Any:
    """Returns parameters with the weights of a plan as abstract QTensors, unless they are some."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        return params
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, params
    )
    return quantize_params(shapes, plan)


def _named_by(plan: Plan, schemes_outside: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Returns the name of each contraction of a plan, and the fields that say what it is."""
    named = [(x.name, x.path, x.op, scheme_of_site(x), x.label) for x in plan.sites]
    for i, skip in enumerate(plan.skipped):
        reason = f"left in float: {skip.reason}"
        if skip.path in schemes_outside:
            reason = f"quantized already: {schemes_outside[skip.path]}"
        label = plan.label_of_skipped(i)
        named.append((plan.name_of_skipped(i), skip.path, skip.op, reason, label))
    return named


def _explained(
    program: Lowering, plain: tuple[str, ...], named: list[tuple[str, ...]] | None
) -> Explanation:
    """Returns the explanation of a program, whose contractions are named by a plan or as they are
    in the program.
    """
    by_site: dict[str, list[Contraction]] = {}
    for contraction in program.contractions:
        by_site.setdefault(contraction.site, []).append(contraction)
    if named is None:
        named = []
        for name in filter(None, by_site):
            path, _, op = name.rpartition(":")
            op = re.split("[#~]", op)[0]
            named.append((name, path, op, "", label_of(path, name, is_weight=False)))
    sites = []
    for name, path, op, scheme, label in named:
        parts = tuple(by_site.pop(name, ()))
        sites.append(Explained(path, op, scheme, _really(op, parts), parts, label))
    others = tuple(c for parts in by_site.values() for c in parts)
    return Explanation(tuple(sites), others, program, plain)


def _really(op: str, contractions: tuple[Contraction, ...]) -> Really:
    """Returns what a site does, from its contractions that read codes; others sum scales."""
    if not contractions:
        return "lookup" if op == "gather" else "gone"
    if any(c.widened for c in contractions):
        return "widened first"
    reading = [c for c in contractions if any(map(_are_codes, (c.dtypes, *c.reads)))]
    if not reading:
        return "float"
    return "codes" if all(map(_multiplies_codes, reading)) else "converted"


def _multiplies_codes(c: Contraction) -> bool:
    """Returns whether both operands are codes; or integers, or elements read as codes, if no
    product for matrices runs.
    """
    if "by elements" in c.runs:
        kinds = zip(c.dtypes, c.reads, strict=True)
        return all(_are_codes((dtype, *reads)) or dtype[0] in "su" for dtype, reads in kinds)
    return all(_are_codes((dtype,)) for dtype in c.dtypes)


def _are_codes(dtypes: tuple[str, ...]) -> bool:
    return any(CODES.fullmatch(dtype) for dtype in dtypes)


def _cells(c: Contraction) -> tuple[str, ...]:
    return multiplied(c), c.runs, "?" if c.times is None else str(c.times), remarks(c)
