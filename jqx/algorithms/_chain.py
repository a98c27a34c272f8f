"""Several algorithms, run one after another."""

import dataclasses
from typing import Any

from .._checks import shown
from .._errors import fail
from ..transforms._shared import has


@dataclasses.dataclass(frozen=True, init=False)
class Chain:
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
      ['Awq', 'Gptq']
    """

    algorithms: tuple[Any, ...]

    def __init__(self, *algorithms: Any) -> None:
        name = "algorithms.chain"
        for i, algorithm in enumerate(algorithms):
            is_one = callable(algorithm) or has(algorithm, "run") or _kind(algorithm) != 1
            if not is_one or isinstance(algorithm, (type, Chain)):
                raise fail(
                    name,
                    f"argument {i} is not an algorithm.",
                    given=shown(algorithm),
                    expected="algorithms, such as jqx.algorithms.awq()",
                    fix="call the class; pass the algorithms of an inner chain directly.",
                    error=TypeError,
                )
        kinds = list(map(_kind, algorithms))
        fits = kinds == sorted(kinds) and kinds.count(1) < 2
        if not algorithms or not fits:
            raise fail(
                name,
                "the algorithms are in the wrong order." if algorithms else "there is none.",
                given=", ".join(type(x).__name__ for x in algorithms) or "no argument",
                expected="algorithms that change weights, then at most one that chooses codes, "
                "then "
                "those that correct the remaining error",
                fix="put them in that order, such as chain(smooth_quant(), gptq(), "
                "bias_correction()).",
            )
        object.__setattr__(self, "algorithms", algorithms)


def _kind(algorithm: Any) -> int:
    """Returns the position of an algorithm in a chain."""
    return 0 if has(algorithm, "rewrite") else 2 if has(algorithm, "correct") else 1


chain = Chain
