"""AutoRound: how weights are rounded, and their ranges, learned by signs of gradients."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .._calls import called
from .._checks import check_instance, check_integer, check_pattern, require_that, shown
from ..calibrators import Calibrator
from ..observers._shared import check_weight
from ..tensor import QSpec
from ..transforms import Plan
from ..transforms._shared import Chosen
from ._grids import calibrated
from ._learn import learned
from ._offload import Where, check_offload


@called("algorithms.auto_round", "options go by name: auto_round(steps=100).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoRound:
    """Learns how the weights of a block are rounded by what the block returns: an algorithm of
    `jqx.ptq`.

    To each weight a shift is added before it is rounded, and each range is multiplied by factors of
    at most 1. Both are learned by signs of gradients: blocks one after another, each on inputs that
    those before it, quantized, have made, so that it returns what it does in float. One batch is
    one step. The loss is the squared error of each result of the block, relative to its squares,
    summed; what has lost least over batches is kept, rounding to nearest among it.

    A block is the body of a scan or of `jax.checkpoint`, the innermost; what is in neither is a
    block for each site, with what follows up to where the fewest numbers are handed on. `blocks=`
    names others. Sites in loops that do not step over their weight, and weights that several blocks
    share, are rounded to nearest; the report names them. Activations stay in float.

    Attributes:
      steps: how many there are for each block.
      learning_rate: how far the first step goes; it falls to 0 evenly. `None` is `1 / steps`: a
        shift goes no further than half a step of the grid.
      blocks: a pattern (`re.search`) in the paths of weights: sites in whose paths it finds the
        same are one block, such as `r"layers_\\d+"`. It takes the place of bodies.
      ranges: whether ranges are learned too. They stay where they are quantized in turn, or are
        powers of two.
      calibrator: finds the ranges that it begins with; `None` takes that of each spec.
      weight: how much the rows of inputs count, as that of `jqx.observers.hessian`.
      offload: whether values of batches are kept on the host, or on `"disk"`, between blocks.
      seed: of the order of the batches.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: a field is out of range, or `blocks` no regular expression; when it runs,
        `blocks` finds nothing, or a block cannot be differentiated.

    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", arXiv:2309.05516.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: jax.nn.relu(x @ w)
      >>> w = jax.random.normal(jax.random.key(0), (64, 8))
      >>> x = jax.random.normal(jax.random.key(1), (256, 8)) @ jnp.ones((8, 64)) + 0.1
      >>> algorithm = jqx.algorithms.auto_round(steps=50)
      >>> quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), algorithm, progress=False)
      >>> block = quantize(w, [x]).details[0]
      >>> block.after < 0.1 * block.before
      True
    """

    steps: int = 200
    learning_rate: float | None = None
    blocks: str | None = None
    ranges: bool = True
    calibrator: Calibrator | None = None
    weight: Callable[..., Any] | None = None
    offload: Where = False
    seed: int = 0

    def __post_init__(self) -> None:
        name, rate = "algorithms.auto_round", self.learning_rate
        check_integer(name, "steps", self.steps)
        is_rate = isinstance(rate, (int, float)) and 0 < rate <= 1
        for field, fits, expected in (
            ("steps", self.steps >= 1, "1 or more"),
            ("learning_rate", rate is None or is_rate, "a number above 0, up to 1"),
        ):
            require_that(
                fits,
                error=ValueError,
                function=name,
                problem=f"`{field}` is out of range.",
                given=f"{field} == {shown(getattr(self, field))}",
                expected=expected,
                mend="leave it out for the default.",
            )
        if self.blocks is not None:
            mend = "pass a pattern such as r'layers_[0-9]+'."
            check_pattern(name, "blocks", self.blocks, mend=mend)
        if self.calibrator is not None:
            mend = "pass for example jqx.calibrators.mse."
            check_instance(name, "calibrator", self.calibrator, Calibrator, mend=mend)
        check_weight(name, self.weight)
        check_offload(name, self.offload)

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that finds the first ranges."""
        return calibrated(spec, self.calibrator)

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
    ) -> Chosen:
        """Returns the parameters with the codes that were learned, and a report."""
        return learned(self, f, plan, params, batches, progress=progress)


auto_round = AutoRound
