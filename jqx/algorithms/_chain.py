"""Algorithms one after another."""

import dataclasses
from typing import Any

from .._checks import require_that, shown


@dataclasses.dataclass(frozen=True, init=False)
class Chain:
    """Algorithms of `jqx.ptq`, one after another: those that change weights; one that chooses
    codes, or none, which rounds to nearest; those that correct what is lost then. The report is a
    tuple of theirs.

    Attributes:
      algorithms: in order.

    Raises:
      TypeError: one is no algorithm.
      ValueError: there is none, or they are not in that order.

    Example:
      >>> import jqx
      >>> algorithms = jqx.algorithms.awq(), jqx.algorithms.gptq()
      >>> [type(x).__name__ for x in jqx.algorithms.chain(*algorithms).algorithms]
      ['Awq', 'Gptq']
    """

    algorithms: tuple[Any, ...]

    def __init__(self, *algorithms: Any) -> None:
        name = "algorithms.chain"
        for i, algorithm in enumerate(algorithms):
            is_one = callable(algorithm) or hasattr(algorithm, "run") or _kind(algorithm) != 1
            require_that(
                is_one and not isinstance(algorithm, (type, Chain)),
                error=TypeError,
                function=name,
                problem=f"argument {i} is no algorithm.",
                given=shown(algorithm),
                expected="algorithms, such as jqx.algorithms.awq()",
                mend="call the class; write out what a chain in a chain has.",
            )
        kinds = list(map(_kind, algorithms))
        fits = kinds == sorted(kinds) and kinds.count(1) < 2
        require_that(
            algorithms and fits,
            error=ValueError,
            function=name,
            problem="the algorithms are not in order." if algorithms else "there is none.",
            given=", ".join(type(x).__name__ for x in algorithms) or "no argument",
            expected="algorithms that change weights, then at most one that chooses codes, then "
            "those that correct what these have lost",
            mend="put them in that order, such as chain(smooth_quant(), gptq(), "
            "bias_correction()).",
        )
        object.__setattr__(self, "algorithms", algorithms)


def _kind(algorithm: Any) -> int:
    """Returns where an algorithm stands in a chain."""
    return 0 if hasattr(algorithm, "rewrite") else 2 if hasattr(algorithm, "correct") else 1


chain = Chain
