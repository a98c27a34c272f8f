"""Several algorithms, run one after another."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ..checks import Rule, called, check_fields, choice, flag, instance, nothing, shown
from ..errors import fail
from ..files import as_path
from ..statistics.calibrators import Calibrator
from ..statistics.statistics import check_weight
from ..transforms.algorithm import has
from ..transforms.plan import Plan


@dataclasses.dataclass(frozen=True, init=False)
class chain:
    """Runs several algorithms of `jqx.ptq` in order.

    First come those that change weights. Then at most one chooses codes; without one, weights are
    rounded to nearest. Last come those that correct the remaining error. The report is a tuple of
    their reports.

    Attributes:
      algorithms: the algorithms in order.

    Raises:
      TypeError: an argument is not an algorithm.
      ValueError: there are no algorithms, or they are in the wrong order.

    Example:
      >>> import jqx
      >>> algorithms = jqx.algorithms.awq(), jqx.algorithms.gptq()
      >>> [type(x).__name__ for x in jqx.algorithms.chain(*algorithms).algorithms]
      ['awq', 'gptq']
    """

    algorithms: tuple[Any, ...]

    def __init__(self, *algorithms: Any) -> None:
        name = "algorithms.chain"
        for i, algorithm in enumerate(algorithms):
            is_one = callable(algorithm) or has(algorithm, "run") or _kind(algorithm) != 1
            if not is_one or isinstance(algorithm, (type, chain)):
                problem = f"argument {i} is not an algorithm, such as jqx.algorithms.awq()."
                fix = "call the class; pass the algorithms of an inner chain directly."
                raise fail(name, problem, given=shown(algorithm), fix=fix, error=TypeError)
        kinds = list(map(_kind, algorithms))
        if not algorithms or kinds != sorted(kinds) or kinds.count(1) > 1:
            problem = "the algorithms are in the wrong order." if algorithms else "there is none."
            detail = ", ".join(type(x).__name__ for x in algorithms) or "no argument"
            fix = "pass those that change weights, then at most one that chooses codes, then "
            fix += "those that correct: chain(smooth_quant(), gptq(), bias_correction())."
            raise fail(name, problem, given=detail, fix=fix)
        object.__setattr__(self, "algorithms", algorithms)


def _kind(algorithm: Any) -> int:
    """Returns the position of an algorithm in a chain."""
    return 0 if has(algorithm, "rewrite") else 2 if has(algorithm, "correct") else 1


# Rounding to nearest, for when `ptq` should not choose an algorithm itself.


@called("algorithms.nearest", "it has no options: jqx.algorithms.nearest().")
@dataclasses.dataclass(frozen=True)
class nearest:
    """Rounds weights to nearest, and changes nothing else: an algorithm of `jqx.ptq`. Without an
    algorithm, `jqx.ptq` takes the one that measured best for the plan.

    It reads batches only if activations have static scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int4"})
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)
      >>> quantize(jnp.array([[7.0], [2.4]]), [jnp.ones((1, 2))]).params.dequantize()[:, 0]
      Array([7., 2.], dtype=float32)
    """

    lazy: ClassVar[bool] = True

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Any:
        """Returns the parameters unchanged; weights without chosen codes are rounded later."""
        return params


# Errors for options under the names of other libraries, or that the policy or the call has.


_SIZE = (
    "the policy sets the size of groups: jqx.presets.w4a16(block=32), or the scheme "
    "'int4:group=32'."
)
_FORMAT = "the policy sets the format: jqx.presets.w4a16(), or jqx.Policy({'.*': 'int4'})."
_BATCHES = "pass batches to the result: jqx.ptq(f, policy, algorithm)(params, batches)."
_INSTEAD = {
    **dict.fromkeys(("group_size", "groupsize", "block_size", "blocksize", "group"), _SIZE),
    **dict.fromkeys(("bits", "wbits", "w_bit", "nbits", "n_bits", "qtype", "dtype"), _FORMAT),
    **dict.fromkeys(("sym", "symmetric", "zero_point", "asymmetric"), _FORMAT),
    **dict.fromkeys(("dataset", "calib_data", "data", "samples", "nsamples", "batches"), _BATCHES),
    **dict.fromkeys(("percdamp", "damp_percent", "dampening_frac"), "write damping=."),
    **dict.fromkeys(("desc_act", "act_order", "actorder"), "write order='activation'."),
    **dict.fromkeys(("alpha", "smoothing_strength", "migration_strength"), "write strength=."),
    **dict.fromkeys(("iters", "iterations", "n_iter", "epochs"), "write steps=."),
    **dict.fromkeys(("lr", "minmax_lr"), "write learning_rate=."),
    **dict.fromkeys(("r", "lora_rank", "low_rank"), "write rank=."),
}


def algorithm(name: str, fix: str) -> Callable[[Any], Any]:
    """Returns the decorator of a public algorithm, as `called` does."""

    def decorate(kind: Any) -> Any:
        fields = getattr(kind, "__dataclass_fields__", {})

        def instead(option: str) -> str | None:
            text = _INSTEAD.get(option)
            field = text.removeprefix("write ").partition("=")[0] if text else ""
            is_other = text is not None and text.startswith("write ") and field not in fields
            return None if is_other else text

        return called(f"algorithms.{name}", fix, instead)(kind)

    return decorate


def check_options(name: str, options: Any, **rules: Rule) -> None:
    """Checks the options of an algorithm that chooses codes: those that all of them have, and
    others by rules.
    """
    calibrator, offload = instance(Calibrator) | nothing(), flag() | choice("disk")
    fix = "leave it out for the default."
    check_fields(name, options, fix, calibrator=calibrator, offload=offload, **rules)
    if getattr(options, "checkpoint", None) is not None:
        as_path(name, options.checkpoint)
    check_weight(name, options.weight)


# SciPy, imported at first use, which keeps `import jqx` fast.


@functools.cache
def linalg() -> Any:
    """Returns the module of factorizations and solvers."""
    return importlib.import_module("scipy.linalg")


def components(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the number of the connected component of each of `count` vertices, in the graph with
    edges between `a[i]` and `b[i]`.
    """
    sparse = importlib.import_module("scipy.sparse")
    graphs = importlib.import_module("scipy.sparse.csgraph")
    edges = sparse.coo_matrix((np.ones(len(a), bool), (a, b)), (count, count))
    return graphs.connected_components(edges, directed=False)[1]
