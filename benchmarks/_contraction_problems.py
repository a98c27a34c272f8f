"""What the contractions benchmark solves, and what a way to solve it must tell."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from _harness import Call


@dataclass(frozen=True)
class Product:
    """`x [m, k]` times `w [k, n]`.

    Schemes: "static" and "asymmetric" take both as codes (8 bits, one scale for x, one a channel
    for w); "dynamic" quantizes x while timed, with a scale a token; "weight-only" leaves x in
    float32.
    """

    m: int
    k: int
    n: int
    scheme: str = "static"
    bits: int = 8  # of a weight
    block: int | None = None  # of a weight, along k

    def __str__(self) -> str:
        size = f"{self.m} x {self.k} x {self.n}"
        if self.scheme != "weight-only":
            return f"W8A8 {self.scheme}, {size}"
        return f"W{self.bits}, " + (f"blocks of {self.block}, " if self.block else "") + size

    @property
    def tolerance(self) -> float:
        return 0.05 if self.bits == 8 else 0.15

    @property
    def weight_bytes(self) -> int:
        """Of codes and float32 scales."""
        scales = self.n * (self.k // self.block if self.block else 1)
        return self.k * self.n * self.bits // 8 + 4 * scales

    def tiny(self) -> "Product":
        return replace(self, m=min(self.m, 4), k=256, n=64)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(0).standard_normal
        w = draw((self.k, self.n), np.float32) / np.float32(np.sqrt(self.k))
        return draw((self.m, self.k), np.float32), w


@dataclass(frozen=True)
class Conv:
    """A square kernel over images, NHWC by HWIO, stride 1, padding SAME; codes of 8 bits for both.

    One scale for the images, one a channel for the kernel.
    """

    batch: int
    side: int
    channels: int  # in and out
    kernel: int
    depthwise: bool = False
    tolerance: float = 0.05

    def __str__(self) -> str:
        kind = f"{'depthwise ' if self.depthwise else ''}{self.kernel}x{self.kernel}"
        return f"{kind}, {self.batch}x{self.side}x{self.side}x{self.channels}"

    @property
    def groups(self) -> int:
        return self.channels if self.depthwise else 1

    def tiny(self) -> "Conv":
        return replace(self, batch=1, side=6, channels=8)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(0).standard_normal
        x = draw((self.batch, self.side, self.side, self.channels), np.float32)
        inputs = self.channels // self.groups
        w = draw((self.kernel, self.kernel, inputs, self.channels), np.float32)
        return x, w / np.float32(self.kernel * np.sqrt(inputs))


@dataclass(frozen=True)
class Attention:
    """Self-attention over one sequence: four projections with dynamic W8A8, and two products."""

    length: int = 512
    width: int = 768
    heads: int = 12
    tolerance: float = 0.05

    def __str__(self) -> str:
        return f"sequence {self.length}, width {self.width}, {self.heads} heads"

    def tiny(self) -> "Attention":
        return replace(self, length=16, width=64, heads=2)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(0).standard_normal
        w = draw((4, self.width, self.width), np.float32) / np.float32(np.sqrt(self.width))
        return draw((self.length, self.width), np.float32), w


Problem = Product | Conv | Attention


class NotAvailable(Exception):
    """Why a library has no variant of a problem."""


class Variant(NamedTuple):
    """One way to solve a problem.

    Attributes:
      name: the library, a comma, and the form if it has several.
      make: returns the call; it may raise where the library cannot do this.
      read: makes of the call's result a float array in the layout of the problem.
      bare: whether it is only the floor: integer products or reads without an epilogue.
    """

    name: str
    make: Callable[[], Call]
    read: Callable[[Any], Any] = np.asarray
    bare: bool = False


Variants = Iterator[Variant]
