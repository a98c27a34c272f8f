"""GPTQ: codes of a weight, chosen one column after another, each of which makes good what those
before it have cost.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from .._calls import called
from .._checks import check_instance, require_that, shown
from .._errors import message
from .._files import Path, as_path
from ..calibrators import Calibrator
from ..observers._shared import check_weight
from ..tensor import QSpec, QTensor
from ..transforms import Plan, calibrate_batches
from ..transforms._shared import Chosen, Weight
from ._checkpoint import Checkpoint, chosen, made_of
from ._factor import Factor, Order, carried_over, corrected, factor
from ._grids import Grids, Group, calibrated
from ._layers import layer_by_layer
from ._matrices import (
    Matrix,
    Unsupported,
    alike_of,
    matrices_of,
    observers_of,
    settled,
    stacked,
    unknown,
)
from ._offload import Where, check_offload
from ._report import AlgorithmReport, MatrixReport
from ._stack import Stack, parted
from ._traced import calls_of

Array = np.ndarray

_STRENGTH = {"none": 0.0, "qep": 0.5, "gptaq": 0.25}
_CHOICES = {
    "order": ("groups", "activation", "given", None),
    "groups": ("static", "dynamic"),
    "propagation": tuple(_STRENGTH),
    "ill_conditioned": ("error", "round"),
    "unsupported": ("error", "round"),
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

    Layer by layer, leaves of parameters may be `jqx.interop.Lazy`, of a model larger than memory: a
    leaf is read for the stage, or the site, that needs it, and dropped before the next. What is
    chosen lies in files, in the folder of the checkpoint, or in one that goes with the result, and
    the weights that are returned are lazy: `jqx.save(..., resume=True)` goes on where it was, as
    their source is a digest of the run. A stack that a scan steps over is read whole in each step:
    layers of their own take the least. Where several sites share a weight, the function is run once
    more, before.

    Attributes:
      damping: what is added to the diagonal of `H`, relative to its mean; ten times as much where
        that does not make it positive definite, up to 1. The report says how much it was.
      order: in which columns are rounded: `"activation"`, those of large inputs first; `"groups"`,
        likewise inside of each group, and groups by their largest; `"given"`, as they are. None of
        them leaves a trace in the codes: columns stay where they are. `None` takes `"activation"`,
        which lost least on the models that were tried, and `"groups"` where these are dynamic.
      groups: scales are found before the first column is rounded, `"static"`, or those of a group
        when the loop comes to it, of columns that are corrected already, `"dynamic"`; not with
        `order="activation"`, and not where scales are quantized in turn (nvfp4).
      calibrator: finds the scales; `None` takes that of each spec.
      sequential: whether `jqx.ptq` goes layer after layer, each on inputs that those before it,
        quantized, have made; else all see float inputs, in one pass.
      propagation: how a site makes good what its inputs have lost, where it is sequential: `"qep"`
        corrects the weight for them before, `"gptaq"` each column as it goes; `"none"` does not.
        Integers that the function makes of floats, such as the expert of a token, are those of
        the quantized one in both.
      strength: how much of that, 0 to 1; `None` is .5 for `qep` and .25 for `gptaq`.
      ill_conditioned: what becomes of a matrix whose `H` no damping makes positive definite, as of
        NaN inputs: an `"error"`, or it is rounded to nearest, `"round"`, and the report says so.
      unsupported: what becomes of a weight whose inputs cannot be known, such as a table that is
        looked up, or one inside of a `shard_map`: likewise.
      least_inputs: how many inputs a matrix must have been given, for each of its columns; with
        fewer it is rounded to nearest, and the report shows no damping. An expert that few tokens
        have reached is chosen by what these have in common: 1 leaves it alone.
      weight: how much the rows of the inputs count, as that of `jqx.observers.hessian`: a function
        of what a batch has, such as `lambda tokens: tokens != 0` where 0 is padding; `None` counts
        all alike.
      offload: whether activations of the batches are kept on the host between stages, or, with
        `"disk"`, in temporary files, where it is sequential; one batch at a time is on the device.
        It is slower, with the same codes.
      checkpoint: a folder for what is chosen already. `None` keeps nothing. Where a run of the same
        function, plan, options, parameters and batches was interrupted, matrices that it has chosen
        are read from there: on the same devices the result is the same, bit for bit.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: a field is out of range or has no such choice, or fields exclude each other; when
        it runs, the checkpoint is of another run.

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
    order: Order | None = None
    groups: Literal["static", "dynamic"] = "static"
    calibrator: Calibrator | None = None
    sequential: bool = True
    propagation: Literal["none", "qep", "gptaq"] = "none"
    strength: float | None = None
    ill_conditioned: Literal["error", "round"] = "error"
    unsupported: Unsupported = "error"
    least_inputs: float = 0.0
    weight: Callable[..., Any] | None = None
    offload: Where = False
    checkpoint: Path | None = None
    function: ClassVar[str] = "algorithms.gptq"

    def __post_init__(self) -> None:
        name = "algorithms.gptq"
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            require_that(
                (value is None or isinstance(value, str)) and value in choices,
                error=ValueError,
                function=name,
                problem=f"`{field}` is unknown.",
                given=f"{field} == {shown(value)}",
                expected=f"one of {', '.join(map(repr, choices))}",
                mend="pass one of these.",
            )
        for field, least, most, expected in (
            ("damping", 1e-12, 1, "a number above 0 and up to 1"),
            ("strength", 0, 1, "a number from 0 to 1"),
            ("least_inputs", 0, 1e9, "a number, 0 or more"),
        ):
            value = getattr(self, field)
            require_that(
                (value is None and field == "strength")
                or (isinstance(value, (int, float)) and least <= value <= most),
                error=ValueError,
                function=name,
                problem=f"`{field}` is out of range.",
                given=f"{field} == {shown(value)}",
                expected=expected,
                mend="leave it out: the default is that of the literature.",
            )
        if self.calibrator is not None:
            mend = "pass for example jqx.calibrators.mse."
            check_instance(name, "calibrator", self.calibrator, Calibrator, mend=mend)
        if self.checkpoint is not None:
            as_path(name, self.checkpoint)
        check_weight(name, self.weight)
        check_offload(name, self.offload)
        both = (
            (self.groups == "dynamic" and self.order == "activation", "groups", "order"),
            (self.propagation != "none" and not self.sequential, "propagation", "sequential"),
            (self.propagation == "none" and self.strength is not None, "strength", "propagation"),
            (self.offload and not self.sequential, "offload", "sequential"),
        )
        for clash, first, second in both:
            values = (f"{field}={getattr(self, field)!r}" for field in (first, second))
            require_that(
                not clash,
                error=ValueError,
                function=name,
                problem=f"`{first}` and `{second}` exclude each other.",
                given=" and ".join(values),
                expected="groups that stay together; inputs that are compared, or kept, layer by "
                "layer",
                mend="leave one of them out.",
            )

    @property
    def observers(self) -> Mapping[str, Any]:
        """What `calibrate_batches` is to record for one pass."""
        return observers_of(self.weight, self.unsupported)

    @property
    def lazy(self) -> bool:
        """Whether parameters may be read when their site comes."""
        return self.sequential

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Chosen:
        """Returns the parameters with codes chosen by statistics of float inputs, in one pass."""
        return self._one_pass(plan, params, stats)

    def _one_pass(
        self, plan: Plan, params: Any, stats: Any, checkpoint: Checkpoint | None = None
    ) -> Chosen:
        entries: list[MatrixReport] = []
        leaves: dict[str, Any] = {}
        plan.map_weights(lambda weight, x: leaves.setdefault(weight.path, x), params)
        codes: dict[str, QTensor] = {}
        for group in Group.of_plan(plan, {path: x.size for path, x in leaves.items()}):
            grids, every = Grids.of_group(group, leaves, self.spec_of), []
            try:
                every = matrices_of("algorithms.gptq", plan, group, stats or {})
            except NotImplementedError:
                if self.unsupported == "error":
                    raise
                entries.append(unknown(plan, group, leaves[next(iter(group.sizes))].shape))
            for alike in alike_of(every):
                given = (lambda alike=alike: alike), stacked(alike), grids, group.whole
                entries.extend(chosen(checkpoint, self, *given))
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
    ) -> Chosen:
        """Returns the parameters with codes chosen by batches: layer by layer, or in one pass."""
        solver, folder = dataclasses.replace(self, offload=False, checkpoint=None), self.checkpoint
        if self.sequential:
            return layer_by_layer(
                solver,
                f,
                plan,
                params,
                batches,
                beside=self.propagation != "none",
                offload=self.offload,
                checkpoint=folder,
                progress=progress,
            )
        known = None
        if folder is not None:
            batches = list(batches)
            calls = calls_of(f, plan, params, batches, self.weight)
            known = Checkpoint(self.function, folder, made_of(plan, solver, calls))
        stats, observers = {}, self.observers
        if any(x.path is None for site in plan.sites for x in site.operands):
            given = f, plan, params, batches
            stats = calibrate_batches(*given, observers=observers, progress=progress)
        return solver._one_pass(plan, params, stats, known)

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that finds scales."""
        return calibrated(spec, self.calibrator)

    def solve(self, matrices: Sequence[Matrix], grids: Grids, weight: Weight) -> list[MatrixReport]:
        """Rounds the elements of matrices of one shape, in place, and returns what is to be
        reported of each.
        """
        spec = self.spec_of(weight.spec)
        parts = parted(matrices)
        return [x for part in parts for x in self._solve(part, grids, weight.path, spec)]

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, path: str, spec: QSpec
    ) -> list[MatrixReport]:
        start = time.perf_counter()
        order = self.order or ("activation" if self.groups == "static" else "groups")
        stack = Stack.of(matrices, grids, spec, order)
        few = [x.rows < self.least_inputs * len(x.hessian) for x in matrices]
        found = [
            None if is_left else self._factor(matrix.hessian, order)
            for matrix, order, is_left in zip(matrices, stack.order, few, strict=True)
        ]
        good = [i for i, own in enumerate(found) if own is not None]
        bad = [i for i, own in enumerate(found) if own is None]
        rounded = np.empty_like(stack.w)
        for i in bad:
            if not few[i]:
                self._refuse(matrices[i])
        if good:
            solvable = [matrices[i] for i in good], stack.of_some(good), [found[i] for i in good]
            rounded[good] = self._rounded(*solvable)
        nearest = stack.nearest()  # with scales that may have been found on the way
        rounded[bad] = nearest[bad]
        damping = [None if own is None else own.damping for own in found]
        rounded, entries = settled(matrices, path, stack.w, nearest, rounded, damping, start)
        grids.write(stack.places, rounded)
        return entries

    def _factor(self, hessian: Array, order: Array) -> Factor | None:
        found = factor(hessian, self.damping, order=order)
        if found is None or self.propagation == "gptaq":  # which needs all of its bits
            return found
        return found._replace(upper=found.upper.astype(np.float32))

    def _rounded(self, matrices: Sequence[Matrix], stack: Stack, found: list[Any]) -> Array:
        strength = _STRENGTH[self.propagation] if self.strength is None else self.strength
        w, carried = stack.w, None
        cross = [matrix.drift.cross for matrix in matrices if matrix.drift is not None]
        if cross and self.propagation == "qep":
            each = zip(stack.w, matrices, cross, found, strict=True)
            w = np.stack(
                [corrected(x, own.hessian, d, strength, by.damping) for x, own, d, by in each]
            )
        if cross and self.propagation == "gptaq":
            each = zip(stack.order, cross, found, strict=True)
            carried = [carried_over(by.upper, d[np.ix_(o, o)], strength) for o, d, by in each]
        solve = stack.dynamic if self.groups == "dynamic" else stack.static
        return solve(w.astype(np.float32), [own.upper for own in found], carried)

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
