"""LoftQ: codes plus a product of two narrow matrices that together approximate the weight."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .._checks import check_integer
from .._errors import fail
from ..transforms import Plan, dequantize_params, quantize_params
from ..transforms._shared import Chosen
from ._channels import Visit
from ._labels import Array
from ._low_rank import (
    Compensation,
    CompensationReport,
    basis_of,
    compensated,
    in_steps,
    narrow,
    without,
)
from ._options import algorithm

_NAME = "algorithms.loftq"


@algorithm("loftq", "pass options by name, such as jqx.algorithms.loftq(rank=64).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loftq:
    """Approximates each weight by codes plus a product of two narrow matrices: an algorithm of
    `jqx.ptq` that needs no data.

    It alternates between two steps: codes are rounded from the weight minus the product, and the
    product is the best of its rank for the weight minus the dequantized codes. For each weight the
    best round is kept. Use it to start fine-tuning of narrow matrices next to codes (QLoRA). `eora`
    uses the inputs, and has a smaller error without training.

    The product is stored as a map at its site, like that of `eora`, in `quantized.maps`.
    `jqx.linen.init_lora` and `jqx.nnx.init_lora` turn it into trainable adapters.

    Attributes:
      rank: rank of the product, at most that of the weight.
      rounds: number of rounds; with 1, codes are those of rounding to nearest.

    Raises:
      TypeError: an option has the wrong type.
      ValueError: an option is less than 1; at run time, no site can have such a product.

    Source: Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models",
    arXiv:2310.08659.

    Example:
      >>> import jqx, jax
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 32, 32))
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int2:channel"})
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.loftq(rank=8), progress=False)
      >>> entry = quantize(w, [x]).details[0]
      >>> entry.after < 0.6 * entry.before
      True
    """

    rank: int = 32
    rounds: int = 5

    def __post_init__(self) -> None:
        for field in ("rank", "rounds"):
            if not check_integer(_NAME, field, getattr(self, field)) > 0:
                raise fail(
                    _NAME,
                    f"`{field}` is not positive.",
                    given=f"{field} == {getattr(self, field)}",
                    expected="1 or more",
                    fix="leave it out for the default.",
                )

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
    ) -> Chosen:
        """Returns parameters that round to the codes, and the products to add at sites."""
        folds, own = compensated(_NAME, f, plan, params, next(iter(batches)))
        of_place: dict[int, list[Visit]] = {}
        for visit in own:
            of_place.setdefault(visit.place, []).append(visit)
        exact, leaves = folds.leaves(params), folds.leaves(params)
        before: dict[int, float] = {}
        best: dict[int, tuple[float, Any, list[tuple[Visit, Array, Array]]]] = {}
        for _ in range(self.rounds):
            codes = quantize_params(folds.with_leaves(params, leaves), plan)
            real = folds.leaves(dequantize_params(codes))
            for place, visits in of_place.items():
                error, found = 0.0, []
                lost = np.asarray(exact[place], np.float64) - np.asarray(real[place], np.float64)
                before.setdefault(place, float(np.sum(lost**2)))
                for visit in visits:
                    a, b, s = narrow(lost.ravel()[visit.elements], self.rank)
                    error += float(np.sum(s[..., a.shape[-1] :] ** 2))
                    found.append((visit, a, b))
                if place not in best or error < best[place][0]:
                    best[place] = error, leaves[place], found
                leaves[place] = without(exact[place], found)
        kept = {**exact, **{place: leaf for place, (_, leaf, _) in best.items()}}
        maps, entries = {}, []
        for place, (error, _, found) in best.items():
            parts: dict[str, list[tuple[Visit, Array, Array]]] = {}
            for one in found:
                parts.setdefault(folds.site(one[0]).output_key, []).append(one)
            maps |= {key: in_steps(each) for key, each in parts.items()}
            name, rank = folds.name(found[0][0]), found[0][1].shape[-1]
            entries.append(Compensation(name, rank, before[place], error))
        basis = basis_of(folds, [found for _, _, found in best.values()])
        report = CompensationReport(entries)
        return Chosen(folds.with_leaves(params, kept), report, maps, basis)


loftq = Loftq
