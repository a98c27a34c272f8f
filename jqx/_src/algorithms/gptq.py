"""GPTQ: chooses the codes of a weight column by column; later columns compensate for the rounding
errors of earlier ones.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from ..checks import Rule, check_fields, choice, nothing, number, whole
from ..errors import fail
from ..files import Path
from ..statistics.calibrators import Calibrator
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..transforms.algorithm import Chosen
from ..transforms.calibrate import calibrate_batches
from ..transforms.plan import Plan, Weight
from ..transforms.stats import OnNonfinite
from .chain import algorithm, check_options
from .columns import Stack, parted
from .engine import calls_of
from .grids import Grids, Group, calibrated
from .layers import Checkpoint, chosen, layer_by_layer, made_of
from .matrices import (
    Factor,
    Matrix,
    Order,
    Unsupported,
    by_shape,
    carried_over,
    damped,
    factor,
    matrices_of,
    observers_of,
    settled,
    shrunk,
    stacked,
    unknown,
)
from .report import AlgorithmReport, MatrixReport
from .store import Where

Array = np.ndarray


# Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
# Transformers", arXiv:2210.17323; corrections of columns for float inputs: Li et al., "GPTAQ:
# Efficient Finetuning-Free Quantization for Asymmetric Calibration", arXiv:2504.02692.


_STRENGTH = {"none": 0.0, "qep": 0.5, "gptaq": 0.25}
_LEAST_INPUTS = dataclasses.replace(number(), convert=lambda count: count)  # printed as given
_FACTOR = number(0, 2, above=True)
_FACTORS = Rule(
    "factors above 0 and up to 2, such as (0.9, 0.8)",
    lambda factors: isinstance(factors, tuple),
    lambda factors: all(_FACTOR.is_kind(x) and _FACTOR.holds(x) for x in factors),
)


@algorithm("gptq", "pass options by name, such as jqx.algorithms.gptq(order='activation').")
@dataclasses.dataclass(frozen=True)
class gptq:
    """Chooses the codes of weights by GPTQ: an algorithm of `jqx.ptq` and `jqx.quantize_params`.

    For every matrix that a site multiplies by, it minimizes the squared error of the product over
    the inputs, `tr((W - Q) H (W - Q)')` with `H` the sum of `x x'`. Columns are rounded one by one,
    and the remaining columns compensate for the error of each. A row whose final error is above
    that of rounding to nearest with the same scales is rounded to nearest, and reported. All
    formats and granularities of a `QSpec` are supported. Activations stay in float while codes are
    chosen.

    In the sequential mode, leaves of parameters may be `jqx.interop.Lazy`, for a model larger than
    memory. A leaf is read for the stage, or the site, that needs it, and dropped before the next.
    Results are stored in files, in the folder of the checkpoint or in a temporary one that lives as
    long as the result. The returned weights are lazy; as their source is a digest of the run,
    `jqx.save(..., resume=True)` continues an interrupted save. A stack that a scan steps over is
    read whole in each step, so separate layers need the least memory. If several sites share a
    weight, the function is run once more before.

    Attributes:
      damping: what is added to the diagonal of `H`, relative to its mean. If `H` is not positive
        definite then, it is raised by factors of ten, up to 1. `"ledoit-wolf"` estimates it for
        each matrix, as if its inputs were independent: much for few inputs, nearly none for many.
        The report has the final value.
      order: the order in which columns are rounded. `"activation"` starts with the largest inputs;
        `"groups"` does so inside each group, and orders groups by their largest input; `"given"`
        keeps the order. The codes are stored in the original order in any case. `None` takes
        `"activation"`, which had the least error on the models that were tried, or `"groups"` if
        `groups` is `"dynamic"`.
      groups: `"static"` computes all scales before the first column is rounded. `"dynamic"`
        computes those of a group when the loop reaches it, from columns that are corrected already;
        not with `order="activation"`, nor for scales that are quantized themselves (nvfp4).
      calibrator: computes the scales; `None` takes that of each spec.
      sequential: whether `jqx.ptq` processes layer by layer, each on inputs from the quantized
        layers before it. Otherwise all layers see float inputs, in one pass.
      propagation: how a site compensates for the error of its inputs, if `sequential`. `"qep"`
        corrects the weight before rounding, `"gptaq"` corrects each column during the loop;
        `"none"` does not. Integers that the function computes from floats, such as the expert of a
        token, are those of the quantized function in both. `"qep"` leaves a row as it is if
        its scales would cut the correction off so that it loses.
      strength: how much of that correction is applied, 0 to 1; `None` is .5 for `qep` and .25 for
        `gptaq`.
      ill_conditioned: what to do with a matrix whose `H` no damping makes positive definite:
        `"error"` raises, `"round"` rounds to nearest; the report says why. Inputs that are not
        finite are an error in any case, unless `on_nonfinite="ignore"` leaves them out.
      unsupported: what to do with a weight whose inputs cannot be observed, such as a table that is
        looked up, or one inside a `shard_map`: likewise.
      least_inputs: minimum number of inputs of a matrix for each of its columns. With fewer, it is
        rounded to nearest, and the report says why. An expert that few tokens reach would be fitted
        to what these have in common by chance. `None` is 1 for matrices that are multiplied by at
        once, such as experts, or that only some rows of their site reach, and 0 for others. Rows of
        zeros do not reach a matrix.
      factors: factors of the scales that are tried besides 1. Each scale takes that of the least
        squared error of rounding and clipping, weighted by what later columns cannot make up for.
        Scales that rows or matrices share, and those that are quantized themselves, stay as they
        are. Not with `groups="dynamic"`.
      sweeps: number of sweeps over a matrix after the loop. Each first fits the scales of rows to
        their codes, by least squares, and then takes for each column the codes of least error,
        given all others. Scales that rows or matrices share, and those that are quantized
        themselves, stay as they are.
      weight: weights of the rows of the inputs, as in `jqx.observers.hessian`: a function of the
        values of a batch, such as `lambda tokens: tokens != 0` if 0 is padding. `None` gives all
        rows the same weight.
      offload: whether activations of the batches are kept on the host between stages, or, with
        `"disk"`, in temporary files, if `sequential`. One batch at a time is then on the device.
        That is slower, with the same codes.
      checkpoint: a folder for results so far; `None` stores nothing. After an interruption, a run
        with the same function, plan, options, parameters and batches reads finished matrices from
        it. On the same devices the result is the same, bit for bit.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field is out of range or unknown, or fields exclude each other; at run time, the
        checkpoint belongs to another run.

    Source: Frantar et al., arXiv:2210.17323; `qep`: Arai and Ichikawa, arXiv:2504.09629; `gptaq`:
    Li et al., arXiv:2504.02692; the order by groups: GPTQModel; sweeps: Behdin et al.,
    arXiv:2309.01885, and Kim et al., arXiv:2602.02126.

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

    damping: float | Literal["ledoit-wolf"] = 0.01
    order: Order | None = None
    groups: Literal["static", "dynamic"] = "static"
    calibrator: Calibrator | None = None
    sequential: bool = True
    propagation: Literal["none", "qep", "gptaq"] = "none"
    strength: float | None = None
    ill_conditioned: Literal["error", "round"] = "error"
    unsupported: Unsupported = "error"
    least_inputs: float | None = None
    factors: tuple[float, ...] = ()
    sweeps: int = 0
    weight: Callable[..., Any] | None = None
    offload: Where = False
    checkpoint: Path | None = None
    function: ClassVar[str] = "algorithms.gptq"

    def __post_init__(self) -> None:
        name = "algorithms.gptq"
        fix = "pass one of these; the policy sets the size of groups: the scheme 'int4:group=32'."
        check_fields(name, self, fix, groups=choice("static", "dynamic"))
        check_options(
            name,
            self,
            damping=number(0, 1, above=True) | choice("ledoit-wolf"),
            order=choice("groups", "activation", "given", None),
            propagation=choice(*_STRENGTH),
            strength=number(0, 1) | nothing(),
            ill_conditioned=choice("error", "round"),
            unsupported=choice("error", "round"),
            least_inputs=_LEAST_INPUTS | nothing(),
            factors=_FACTORS,
            sweeps=whole(),
        )
        for clash, *fields in (
            (self.groups == "dynamic" and self.order == "activation", "groups", "order"),
            (self.propagation != "none" and not self.sequential, "propagation", "sequential"),
            (self.propagation == "none" and self.strength is not None, "strength", "propagation"),
            (self.offload and not self.sequential, "offload", "sequential"),
            (bool(self.factors) and self.groups == "dynamic", "factors", "groups"),
        ):
            if clash:
                problem = f"`{fields[0]}` and `{fields[1]}` exclude each other."
                detail = " and ".join(f"{field}={getattr(self, str(field))!r}" for field in fields)
                raise fail(name, problem, given=detail, fix="leave one of them out.")

    @property
    def observers(self) -> Mapping[str, Any]:
        """What `calibrate_batches` must record for one pass."""
        return observers_of(self.weight, self.unsupported)

    @property
    def lazy(self) -> bool:
        """Whether parameters may be lazy, and are read when their site is reached."""
        return self.sequential

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Chosen:
        """Returns parameters with codes chosen from statistics of float inputs, in one pass."""
        return self._one_pass(plan, params, stats)

    def _one_pass(
        self, plan: Plan, params: Any, stats: Any, checkpoint: Checkpoint | None = None
    ) -> Chosen:
        entries: list[MatrixReport] = []
        leaves: dict[str, Any] = {}
        plan.map_weights(lambda weight, x: leaves.setdefault(weight.path, x), params)
        codes: dict[str, QTensor] = {}
        for group in Group.of_plan(plan, {path: x.size for path, x in leaves.items()}):
            grids, matrices = Grids.of_group(group, leaves, self.spec_of), []
            try:
                matrices = matrices_of("algorithms.gptq", plan, group, stats or {})
            except NotImplementedError:
                if self.unsupported == "error":
                    raise
                entries.append(unknown(plan, group, leaves[next(iter(group.sizes))].shape))
            for same in by_shape(matrices):
                get = partial(list, same)
                entries += chosen(checkpoint, self, get, stacked(same), grids, group.whole)
            codes |= grids.quantized()
        quantized = plan.map_weights(lambda weight, _: codes[weight.path], params)
        return Chosen(quantized, AlgorithmReport(tuple(entries)))

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns parameters with codes chosen from batches: layer by layer, or in one pass."""
        solver, folder = dataclasses.replace(self, offload=False, checkpoint=None), self.checkpoint
        if self.sequential:
            return layer_by_layer(
                solver,
                f,
                plan,
                params,
                batches,
                with_float=self.propagation != "none",
                offload=self.offload,
                checkpoint=folder,
                progress=progress,
                on_nonfinite=on_nonfinite,
            )
        checkpoint = None
        if folder is not None:
            batches = list(batches)
            calls = calls_of(f, plan, params, batches, self.weight)
            checkpoint = Checkpoint(self.function, folder, made_of(plan, solver, calls))
        stats, observers = {}, self.observers
        if any(x.path is None for site in plan.sites for x in site.operands):
            stats = calibrate_batches(
                f,
                plan,
                params,
                batches,
                observers=observers,
                progress=progress,
                on_nonfinite=on_nonfinite,
            )
        return solver._one_pass(plan, params, stats, checkpoint)

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that computes scales."""
        return calibrated(spec, self.calibrator)

    def solve(self, matrices: Sequence[Matrix], grids: Grids, weight: Weight) -> list[MatrixReport]:
        """Rounds the elements of matrices of one shape, in place, and returns a report of each."""
        spec = self.spec_of(weight.spec)
        parts = parted(matrices)
        return [x for part in parts for x in self._solve(part, grids, weight.path, spec)]

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, path: str, spec: QSpec
    ) -> list[MatrixReport]:
        start = time.perf_counter()
        order = self.order or ("activation" if self.groups == "static" else "groups")
        stack = Stack.of(matrices, grids, spec, order)
        few_reasons = [x.why_few(self.least_inputs) for x in matrices]
        solved = [
            None if is_left else self._factor(matrix, order)
            for matrix, order, is_left in zip(matrices, stack.order, few_reasons, strict=True)
        ]
        good = [i for i, solution in enumerate(solved) if solution is not None]
        bad = [i for i, solution in enumerate(solved) if solution is None]
        rounded = np.empty_like(stack.w)
        for i in bad:
            if not few_reasons[i]:
                self._refuse(matrices[i])
        if good:
            solvable = (
                [matrices[i] for i in good],
                stack.of_some(good),
                [x for x in solved if x is not None],
            )
            rounded[good] = self._rounded(*solvable)
        nearest = stack.nearest()  # with scales that the loop may have computed
        rounded[bad] = nearest[bad]
        damping = [None if solution is None else solution.damping for solution in solved]
        reasons = [
            (is_left or "its Hessian is not positive definite") if solution is None else ""
            for solution, is_left in zip(solved, few_reasons, strict=True)
        ]
        rounded, entries = settled(
            matrices, path, stack.w, nearest, rounded, damping, start, reasons
        )
        grids.write(stack.element_ids, rounded)
        return entries

    def _factor(self, matrix: Matrix, order: Array) -> Factor | None:
        damping = self.damping
        if damping == "ledoit-wolf":
            damping = shrunk(matrix.hessian, matrix.rows, matrix.fourth)
        result = factor(matrix.hessian, damping, order=order)
        if result is None or self.propagation == "gptaq":  # gptaq needs float64
            return result
        return result._replace(upper=result.upper.astype(np.float32))

    def _rounded(
        self, matrices: Sequence[Matrix], stack: Stack, factors: Sequence[Factor]
    ) -> Array:
        strength = _STRENGTH[self.propagation] if self.strength is None else self.strength
        w, carried = stack.w, None
        cross = [matrix.drift.cross for matrix in matrices if matrix.drift is not None]
        if cross and (self.propagation == "qep" or self.factors or self.sweeps):
            w = np.stack(
                [
                    matrix.corrected(x, stack.grids.limits(label), strength, solved.damping)
                    for x, label, matrix, solved in zip(
                        w, stack.label, matrices, factors, strict=True
                    )
                ]
            ).astype(np.float32)
        if cross and self.propagation == "gptaq":
            carried = [
                carried_over(solved.upper, d[np.ix_(order, order)], strength)
                for order, d, solved in zip(stack.order, cross, factors, strict=True)
            ]
        start, uppers = w if carried is None else stack.w, [x.upper for x in factors]
        loop = stack.dynamic if self.groups == "dynamic" else stack.static
        solve = partial(loop, start, uppers, carried)
        if self.factors:
            # What rounding a column costs after all later columns made up for it: 1 / [H^-1]_jj of
            # the columns that are left (Optimal Brain Surgeon, Hassibi and Stork, 1993).
            importance = np.empty((len(w), w.shape[-1]), np.float32)
            for row, order, upper in zip(importance, stack.order, uppers, strict=True):
                saliency = np.diagonal(upper).astype(np.float64) ** -2
                row[order] = saliency / saliency.mean()
            stack.fit_scales(w, importance, self.factors)
        rounded = solve()
        if not self.sweeps:
            return rounded
        hessians = [
            damped(matrix.hessian, solved.damping).astype(np.float32)
            for matrix, solved in zip(matrices, factors, strict=True)
        ]
        for _ in range(self.sweeps):
            rounded = stack.swept(w, rounded, hessians)
        return rounded

    def _refuse(self, matrix: Matrix) -> None:
        if self.ill_conditioned == "round":
            return
        bad = int(np.sum(~np.isfinite(matrix.hessian)))
        problem = f"the Hessian of {matrix.name} is not positive definite, however it is damped."
        detail = f"{matrix.rows} inputs of {len(matrix.hessian)} channels; {bad} sums of "
        detail += "their products are not finite"
        fix = "calibrate on batches without NaN and infinities, or pass ill_conditioned='round'."
        raise fail("algorithms.gptq", problem, given=detail, fix=fix)
