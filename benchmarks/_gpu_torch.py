"""torch's matrix products on the GPU, as a yardstick: bfloat16, `_int_mm` and `_scaled_mm`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TorchVariant:
    """A matrix product of torch.

    Attributes:
      name, scheme: as those of a `Variant`.
      operand_bytes, result_bytes: of an element.
      draw: a function of (torch, shape, device) that returns a random matrix.
      product: a function of (torch, x, w), [m, k] and [k, n].
    """

    name: str
    scheme: str
    operand_bytes: int
    result_bytes: int
    draw: Callable[..., Any]
    product: Callable[..., Any]

    def call(
        self, m: int, k: int, n: int, layers: int, device: str = "cuda"
    ) -> Callable[[], object]:
        """Returns a call that multiplies as many pairs of matrices, and waits for the last.

        The second of each is stored as [n, k].
        """
        import torch

        pairs = [
            (self.draw(torch, (m, k), device), self.draw(torch, (n, k), device).t())
            for _ in range(layers)
        ]

        def run() -> Any:
            results = [self.product(torch, x, w) for x, w in pairs]
            if device == "cuda":
                torch.cuda.synchronize()
            return results

        return run


def _bfloat16(torch: Any, shape: tuple[int, int], device: str) -> Any:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _int8(torch: Any, shape: tuple[int, int], device: str) -> Any:
    return (_bfloat16(torch, shape, device) * 32).round().clamp(-127, 127).to(torch.int8)


def _float8(torch: Any, shape: tuple[int, int], device: str) -> Any:
    return _bfloat16(torch, shape, device).to(torch.float8_e4m3fn)


def _scaled_mm(torch: Any, x: Any, w: Any, fast: bool) -> Any:
    rows = torch.full((x.shape[0], 1), 0.5, device=x.device)
    columns = torch.full((1, w.shape[1]), 0.5, device=x.device)
    return torch._scaled_mm(*(x, w, rows, columns), out_dtype=torch.bfloat16, use_fast_accum=fast)


TORCH = (
    TorchVariant("torch bfloat16", "bf16", 2, 2, _bfloat16, lambda torch, x, w: torch.mm(x, w)),
    TorchVariant(
        "torch _int_mm -> s32", "int8", 1, 4, _int8, lambda torch, x, w: torch._int_mm(x, w)
    ),
    TorchVariant(
        "torch _scaled_mm", "fp8", 1, 2, _float8, lambda torch, x, w: _scaled_mm(torch, x, w, False)
    ),
    TorchVariant(
        *("torch _scaled_mm fast accum", "fp8", 1, 2, _float8),
        lambda torch, x, w: _scaled_mm(torch, x, w, True),
    ),
)


def reason_without_torch() -> str:
    """Returns why there can be no rows of torch, or nothing."""
    try:
        import torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else "it sees no CUDA device"
