"""Several algorithms, run one after another."""

import dataclasses
from typing import Any, ClassVar

from ..checks import called, shown
from ..errors import fail
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
