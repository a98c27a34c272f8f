"""Algorithms one after another."""

import dataclasses
from typing import Any

from .._checks import require_that, shown


@dataclasses.dataclass(frozen=True, init=False)
class Chain:
    """Algorithms of `jqx.ptq`, one after another: those that change weights, and at the end one
    that chooses codes, or none, which rounds to nearest. The report is a tuple of theirs.

    Attributes:
      algorithms: in order.

    Raises:
      TypeError: one is no algorithm.
      ValueError: there is none, or one that chooses codes is not the last.

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
            is_one = callable(algorithm) or hasattr(algorithm, "rewrite")
            require_that(
                is_one and not isinstance(algorithm, (type, Chain)),
                error=TypeError,
                function=name,
                problem=f"argument {i} is no algorithm.",
                given=shown(algorithm),
                expected="algorithms, such as jqx.algorithms.awq()",
                mend="call the class; write out what a chain in a chain has.",
            )
        early = [x for x in algorithms[:-1] if not hasattr(x, "rewrite")]
        require_that(
            algorithms and not early,
            error=ValueError,
            function=name,
            problem="one that chooses codes is not the last." if early else "there is none.",
            given=", ".join(type(x).__name__ for x in algorithms) or "no argument",
            expected="algorithms that change weights, then at most one that chooses codes",
            mend="put it at the end.",
        )
        object.__setattr__(self, "algorithms", algorithms)


chain = Chain
