"""GPTQ: codes of a weight, chosen one column after another, each of which makes good what those
before it have cost.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from .._calls import called
from .._checks import check_instance, require_that, shown
from .._errors import message
from ..calibrators import Affine, Calibrator
from ..calibrators._shared import per_block
from ..tensor import QSpec, QTensor
from ..tensor._shared import rounded_to
from ..transforms import Plan, calibrate_batches
from ..transforms._shared import Chosen, Weight
from ._columns import BLOCK, round_columns
from ._factor import Factor, Order, carried_over, corrected, factor, order_of
from ._layers import layer_by_layer
from ._report import AlgorithmReport, MatrixReport
from ._weight import OBSERVERS, Grids, Matrix, matrices_of

Array = np.ndarray

_STRENGTH = {"none": 0.0, "qep": 0.5, "gptaq": 0.25}
_CHOICES = {
    "order": ("groups", "activation", "given"),
    "groups": ("static", "dynamic"),
    "propagation": tuple(_STRENGTH),
    "ill_conditioned": ("error", "round"),
}


@called("algorithms.gptq", "options go by name, such as jqx.algorithms.gptq(order='activation').")
@dataclasses.dataclass(frozen=True)
class Gptq:
    """Chooses the codes of weights by GPTQ: an algorithm of `jqx.ptq` and `jqx.quantize_params`.

    For every matrix that a site multiplies by it minimises the squared error of the product over
    the inputs, `tr((W - Q) H (W - Q)')` with `H` the sum of `x x'`: columns are rounded one after
    another, and those that are left make good what each has cost. A row that ends with more than
    rounding to nearest costs with the same scales is rounded to nearest, and reported. Any format
    and granularity of a `QSpec` will do. Activations stay in float while codes are chosen.

    Attributes:
      damping: what is added to the diagonal of `H`, relative to its mean; ten times as much where
        that does not make it positive definite, up to 1. The report says how much it was.
      order: in which columns are rounded: `"groups"`, those of large inputs first inside of each
        group, and groups by their largest; `"activation"`, across groups; `"given"`. None of them
        leaves a trace in the codes: columns stay where they are.
      groups: scales are found before the first column is rounded, `"static"`, or those of a group
        when the loop comes to it, of columns that are corrected already, `"dynamic"`; not with
        `order="activation"`, and not where scales are quantized in turn (nvfp4).
      calibrator: finds the scales; `None` takes that of each spec.
      sequential: whether `jqx.ptq` goes layer after layer, each on inputs that those before it,
        quantized, have made; else all see float inputs, in one pass.
      propagation: how a site makes good what its inputs have lost, where it is sequential: `"qep"`
        corrects the weight for them before, `"gptaq"` each column as it goes; `"none"` does not.
      strength: how much of that, 0 to 1; `None` is .5 for `qep` and .25 for `gptaq`.
      ill_conditioned: what becomes of a matrix whose `H` no damping makes positive definite, as of
        NaN inputs: an `"error"`, or it is rounded to nearest, `"round"`, and the report says so.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: a field is out of range or has no such choice, or fields exclude each other.

    Source: Frantar et al., arXiv:2210.17323; `qep`: Arai and Ichikawa, arXiv:2504.09629; `gptaq`:
    Li et al., arXiv:2504.02692; order by groups: that of GPTQModel.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w = jax.random.normal(jax.random.key(0), (64, 8))
      >>> x = jax.random.normal(jax.random.key(1), (256, 8)) @ jnp.ones((8, 64)) + 0.1
      >>> quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), jqx.algorithms.gptq(), progress=False)
      >>> entry = quantize(w, [x]).details[0]
      >>> entry.after < 0.1 * entry.before
      True
    """

    damping: float = 0.01
    order: Order = "groups"
    groups: Literal["static", "dynamic"] = "static"
    calibrator: Calibrator | None = None
    sequential: bool = True
    propagation: Literal["none", "qep", "gptaq"] = "none"
    strength: float | None = None
    ill_conditioned: Literal["error", "round"] = "error"

    def __post_init__(self) -> None:
        name = "algorithms.gptq"
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            require_that(
                isinstance(value, str) and value in choices,
                error=ValueError,
                function=name,
                problem=f"`{field}` is unknown.",
                given=f"{field} == {shown(value)}",
                expected=f"one of {', '.join(map(repr, choices))}",
                mend="pass one of these.",
            )
        for field, least, value in (
            ("damping", 1e-12, self.damping),
            ("strength", 0, self.strength),
        ):
            require_that(
                (value is None and field == "strength")
                or (isinstance(value, (int, float)) and least <= value <= 1),
                error=ValueError,
                function=name,
                problem=f"`{field}` is out of range.",
                given=f"{field} == {shown(value)}",
                expected="a number above 0 and up to 1" if least else "a number from 0 to 1",
                mend="leave it out: the default is that of the literature.",
            )
        if self.calibrator is not None:
            mend = "pass for example jqx.calibrators.mse."
            check_instance(name, "calibrator", self.calibrator, Calibrator, mend=mend)
        both = (
            (self.groups == "dynamic" and self.order == "activation", "groups", "order"),
            (self.propagation != "none" and not self.sequential, "propagation", "sequential"),
            (self.propagation == "none" and self.strength is not None, "strength", "propagation"),
        )
        for clash, first, second in both:
            values = (f"{field}={getattr(self, field)!r}" for field in (first, second))
            require_that(
                not clash,
                error=ValueError,
                function=name,
                problem=f"`{first}` and `{second}` exclude each other.",
                given=" and ".join(values),
                expected="groups that stay together, and inputs that are compared layer by layer",
                mend="leave one of them out.",
            )

    @property
    def observers(self) -> Mapping[str, Any]:
        """What `calibrate_batches` is to record for one pass."""
        return OBSERVERS

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Chosen:
        """Returns the parameters with codes chosen by statistics of float inputs, in one pass."""
        entries: list[MatrixReport] = []

        def choose(weight: Weight, x: Any) -> QTensor:
            grids = Grids.of(x, self.spec_of(weight.spec))
            for matrix in matrices_of("algorithms.gptq", plan, weight, stats or {}):
                entries.append(self.solve(matrix, grids, weight))
            return grids.quantized(weight.spec)

        return Chosen(plan.map_weights(choose, params), AlgorithmReport(tuple(entries)))

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
    ) -> Chosen:
        """Returns the parameters with codes chosen by batches: layer by layer, or in one pass."""
        if self.sequential:
            beside = self.propagation != "none"
            return layer_by_layer(self, f, plan, params, batches, beside=beside, progress=progress)
        observers = self.observers
        stats = calibrate_batches(f, plan, params, batches, observers=observers, progress=progress)
        return self(plan, params, stats)

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that finds scales."""
        if self.calibrator is None:
            return spec
        return dataclasses.replace(spec, calibrator=self.calibrator)

    def solve(self, matrix: Matrix, grids: Grids, weight: Weight) -> MatrixReport:
        """Rounds the elements of a matrix, in place, and returns what is to be reported."""
        start = time.perf_counter()
        task = _Task.of(matrix, grids, self.spec_of(weight.spec), self.order)
        own = matrix.hessian[np.ix_(task.order, task.order)]
        found = factor(own, self.damping)
        if found is None:
            self._refuse(matrix)
            rounded = task.nearest()
        else:
            rounded = self._rounded(matrix, task, found)
        nearest = task.nearest()
        before, after = (matrix.loss(task.w, x) for x in (nearest, rounded))
        worse = ~(after <= before)
        rounded[worse] = nearest[worse]
        grids.values[matrix.places] = rounded
        total = max(matrix.rows, 1)
        return MatrixReport(
            sites=matrix.sites,
            step=matrix.step,
            path=weight.path,
            shape=(task.w.shape[0], task.w.shape[1]),
            before=float(before.sum()) / total,
            after=float(np.where(worse, before, after).sum()) / total,
            damping=None if found is None else found.damping,
            inputs=matrix.rows,
            dead=int(np.sum(np.diagonal(matrix.hessian) <= 0)),
            kept=int(worse.sum()),
            seconds=time.perf_counter() - start,
        )

    def _rounded(self, matrix: Matrix, task: "_Task", found: Factor) -> Array:
        strength = _STRENGTH[self.propagation] if self.strength is None else self.strength
        w, carried = task.w, None
        if matrix.drift is not None and self.propagation == "qep":
            w = corrected(w, matrix.hessian, matrix.drift.cross, strength, found.damping)
        if matrix.drift is not None and self.propagation == "gptaq":
            cross = matrix.drift.cross[np.ix_(task.order, task.order)]
            carried = carried_over(found.upper, cross, strength)
        solve = task.dynamic if self.groups == "dynamic" else task.static
        return solve(w.astype(np.float32), found.upper, carried)

    def _refuse(self, matrix: Matrix) -> None:
        if self.ill_conditioned == "round":
            return
        bad = int(np.sum(~np.isfinite(matrix.hessian)))
        raise ValueError(
            message(
                "algorithms.gptq",
                f"the Hessian of {matrix.name} is not positive definite, however it is damped.",
                given=f"{matrix.rows} inputs of {len(matrix.hessian)} channels; {bad} sums of "
                "their products are no numbers",
                expected="inputs without NaN and infinities",
                mend="calibrate on other batches, or pass ill_conditioned='round'.",
            )
        )


gptq = Gptq


@dataclasses.dataclass(frozen=True)
class _Task:
    """A matrix that is to be rounded, [rows, columns].

    Attributes:
      w: its values, float32.
      label: of each the index of its scale.
      order: of columns.
      columns: of each column the number of its group.
      grids: scales and zero points, by index.
      spec: how values are rounded.
    """

    w: Array
    label: Array
    order: Array
    columns: Array
    grids: Grids
    spec: QSpec

    @classmethod
    def of(cls, matrix: Matrix, grids: Grids, spec: QSpec, order: Order) -> "_Task":
        """Reads a matrix."""
        label = grids.label[matrix.places]
        _, first, group = np.unique(label, axis=1, return_index=True, return_inverse=True)
        rank = np.empty(len(first), int)
        rank[np.argsort(first)] = np.arange(len(first))
        columns = rank[group.ravel()]
        w = grids.values[matrix.places]
        return cls(w, label, order_of(matrix.hessian, columns, order), columns, grids, spec)

    def nearest(self) -> Array:
        """Returns the matrix rounded to nearest with the scales as they are."""
        scale, zero_point = self.grids.at(self.label)
        return np.array(_nearest(self.w, scale, zero_point, spec=self.spec))

    def static(self, w: Array, upper: Array, carried: Array | None) -> Array:
        """Returns the columns rounded with the scales as they are."""
        size = min(BLOCK, len(upper))
        more = -len(upper) % size
        label = np.pad(self.label.T[self.order], ((0, more), (0, 0)), mode="edge")
        affine = Affine(*map(_on_device, self.grids.at(label)))
        return self._run(w, upper, carried, size, affine)[0]

    def dynamic(self, w: Array, upper: Array, carried: Array | None) -> Array:
        """Returns the columns rounded with scales that are found on the way, and writes these."""
        runs = self.columns[self.order]
        starts = np.flatnonzero(np.diff(runs, prepend=-1))
        sizes = np.diff(starts, append=len(runs))
        size = int(sizes[0])
        apart = len(np.unique(self.label)) == len(self.label) * len(starts)
        plain = not isinstance(self.grids.nearest.scale, QTensor)
        require_that(
            plain and apart and len(starts) == runs.max() + 1 and bool(np.all(sizes[:-1] == size)),
            error=ValueError,
            function="algorithms.gptq",
            problem="these scales cannot be found on the way.",
            given=f"{self.spec} of {len(self.label)} rows, {len(starts)} groups of "
            f"{sorted({*sizes.tolist()})} columns",
            expected="groups of one size, of which each row has a scale of its own, in float or a "
            "power of two",
            mend="pass groups='static'.",
        )
        by_row = per_block({0: size, 1: 1})
        spec = dataclasses.replace(self.spec, granularity=by_row, stacked=())
        rounded, affine = self._run(w, upper, carried, size, None, spec)
        self.grids.put(self.label[:, self.order[starts]].T, affine)
        return rounded

    def _run(
        self,
        w: Array,
        upper: Array,
        carried: Array | None,
        size: int,
        affine: Affine | None,
        spec: QSpec | None = None,
    ) -> tuple[Array, Affine]:
        """Runs the loop on whole blocks: columns of zeros are added behind."""
        count, more = len(upper), -len(upper) % size
        wide = np.eye(count + more)
        wide[:count, :count] = upper
        also = None if carried is None else np.pad(carried, ((0, more), (0, more)))
        found = round_columns(
            _on_device(np.pad(w.T[self.order], ((0, more), (0, 0)))),
            _on_device(wide.astype(np.float32)),
            _on_device(None if also is None else also.astype(np.float32)),
            affine,
            None if affine is None else _on_device(np.arange(count + more)),
            spec=spec or self.spec,
            size=size,
        )
        rounded = np.empty_like(self.w)
        rounded[:, self.order] = np.asarray(found.rounded)[:count].T
        return rounded, Affine(found.scale, found.zero_point)


def _on_device(x: Array | None) -> Any:
    return None if x is None else jax.device_put(x)


_nearest = jax.jit(rounded_to, static_argnames="spec")
