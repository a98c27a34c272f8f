"""What the GPU benchmark measures, as data: groups of shapes, and variants measured at each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from operator import attrgetter
from typing import Any

import _gpu_formulations as f
import jax
import jax.numpy as jnp

import jqx

BASELINE = "bfloat16"
DENSE, DENSE_8BIT = 989e12, 1979e12  # nominal operations a second of bfloat16; of int8 and float8

PACK_FOR, CONVOLUTION = "QTensor.pack_for", "conv_general_dilated"

INT8_ROWS = jqx.QSpec(jnp.int8, jqx.per_token())
FLOAT8_ROWS = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_token())
INT8 = jqx.QSpec(jnp.int8, jqx.per_channel())
INT4 = jqx.QSpec(jnp.int4, jqx.per_channel())
FLOAT8 = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_channel())
INT8_TENSOR = jqx.QSpec(jnp.int8)
FLOAT8_TENSOR = jqx.QSpec(jnp.float8_e4m3fn)


@dataclass(frozen=True)
class Variant:
    """One way to contract.

    Attributes:
      name: of the formulation and, where there is a choice, the layout of the weights.
      scheme: what is computed; variants of one scheme are alternatives to each other.
      run: a function of (x, w, contracted axis of w).
      x, w: how the operands are quantized; `None` is bfloat16.
      contracted: the axis of w that is contracted: 1 for [N, K], "NT"; 0 for [K, N], "NN". That of
        convolutions keep axis 0, as NT.
      packed: whether w is laid out by `pack_for("gpu")`.
      peak: operations a second that the multiplication could reach.
      needs: the name in jqx without which there is no such variant.
    """

    name: str
    scheme: str
    run: Callable[..., Any]
    x: jqx.QSpec | None = None
    w: jqx.QSpec | None = None
    contracted: int = 0
    packed: bool = False
    peak: float = DENSE
    needs: str = "QTensor"

    @property
    def available(self) -> bool:
        try:
            return attrgetter(self.needs)(jqx) is not None
        except AttributeError:
            return False


@dataclass(frozen=True)
class Gemm:
    """[m, k] times [k, n]; without n, an array that is only read."""

    m: int
    k: int
    n: int | None = None

    def shapes(self, contracted: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Returns the shapes of x and w."""
        if self.n is None:
            return (self.m, self.k), None
        return (self.m, self.k), (self.n, self.k) if contracted else (self.k, self.n)

    @property
    def operations(self) -> int:
        return 2 * self.m * self.k * (self.n or 0)

    def __str__(self) -> str:
        return "x".join(str(size) for size in (self.m, self.k, self.n) if size)


@dataclass(frozen=True)
class Convolution:
    """A 3x3 convolution of a batch of square images, stride 1, padded."""

    batch: int
    side: int
    channels: int

    def shapes(self, contracted: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Returns the shapes of x (NHWC) and w (OHWI)."""
        c = self.channels
        return (self.batch, self.side, self.side, c), (c, 3, 3, c)

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.side**2 * 9 * self.channels**2

    def __str__(self) -> str:
        return f"{self.batch}x{self.side}x{self.side}x{self.channels}"


@dataclass(frozen=True)
class Group:
    """Shapes, the most telling first, and the variants that are measured at each.

    Attributes:
      layers: how many operands there are of each kind, so that no cache holds them: 16 of the
        smallest, 4-bit [4096, 14336], take 470 MB.
      stacked: whether the operands are stacked, and scanned over.
    """

    shapes: tuple[Gemm | Convolution, ...]
    variants: tuple[Variant, ...]
    layers: int = 16
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table: a variant at a shape."""

    group: str
    shape: Gemm | Convolution
    variant: Variant
    layers: int
    stacked: bool

    def operands(self, key: jax.Array) -> tuple[Any, Any]:
        """Returns x and w of one layer, drawn at random; no w is an empty tuple."""
        v = self.variant
        x_shape, w_shape = self.shape.shapes(v.contracted)
        keys = jax.random.split(key)
        x = _draw(keys[0], x_shape, v.x, 0, False)
        if w_shape is None:
            return x, ()
        return x, _draw(keys[1], w_shape, v.w, 1 - v.contracted, v.packed)

    def run(self, x: Any, w: Any) -> Any:
        return self.variant.run(x, w, self.variant.contracted)

    @property
    def weight_size(self) -> int:
        """The number of elements of w."""
        shape = self.shape.shapes(self.variant.contracted)[1]
        return 0 if shape is None else prod(shape)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))  # compiled once for all rows that draw alike
def _draw(
    key: jax.Array, shape: tuple[int, ...], spec: jqx.QSpec | None, kept: int, packed: bool
) -> Any:
    x = jax.random.normal(key, (prod(shape),), jnp.bfloat16).reshape(shape)
    if spec is None:
        return x
    q = jqx.QTensor.quantize(x, spec.resolve(len(shape), (kept,)))
    return q.pack_for("gpu") if packed else q  # type: ignore[attr-defined]


def _integer(name: str, run: Callable[..., Any], **fields: Any) -> Variant:
    defaults = {"scheme": "int8", "x": INT8_ROWS, "w": INT8, "peak": DENSE_8BIT}
    return Variant(name, run=run, **(defaults | fields))


def _float8(name: str, run: Callable[..., Any], **fields: Any) -> Variant:
    defaults = {"scheme": "fp8", "x": FLOAT8_ROWS, "w": FLOAT8, "contracted": 1}
    return Variant(name, run=run, peak=DENSE_8BIT, **(defaults | fields))


def _weight_only(scheme: str, spec: jqx.QSpec) -> tuple[Variant, ...]:
    return (
        Variant(f"{scheme} NT", scheme, f.weight_only, w=spec, contracted=1),
        Variant(f"{scheme} NN", scheme, f.weight_only, w=spec),
        Variant(f"jqx {scheme} NN", scheme, f.jqx_dot, w=spec),
        Variant(f"jqx {scheme} packed", scheme, f.jqx_dot, w=spec, packed=True, needs=PACK_FOR),
    )


def _blocks(size: int) -> tuple[Variant, ...]:
    scheme, spec = f"W4 g{size}", jqx.QSpec(jnp.int4, jqx.per_group(size))
    return (
        Variant(f"{scheme} batched", scheme, f.blocks_batched, w=spec),
        Variant(f"{scheme} 3D", scheme, f.blocks_3d, w=spec),
        Variant(f"jqx {scheme}", scheme, f.jqx_dot, w=spec),
        Variant(f"jqx {scheme} packed", scheme, f.jqx_dot, w=spec, packed=True, needs=PACK_FOR),
    )


BFLOAT16 = Variant(BASELINE, "bf16", f.dot)
W8, W4 = _weight_only("W8", INT8), _weight_only("W4", INT4)
W4_2D = Variant("W4 g128 2D", "W4 g128", f.blocks_2d, w=jqx.QSpec(jnp.int4, jqx.per_group(128)))
W4A8 = (
    _integer("W4A8 NT", f.integer, scheme="W4A8", w=INT4, contracted=1),
    _integer("jqx W4A8 NT", f.jqx_dot, scheme="W4A8", w=INT4, contracted=1),
)

PREFILL = (
    BFLOAT16,
    _integer("int8 NT", f.integer, contracted=1),
    _integer("jqx int8 packed", f.jqx_dot, packed=True, needs=PACK_FOR),
    _float8("fp8 NT", f.float8),
    _float8("jqx fp8 NT", f.jqx_dot),
    _integer("jqx int8 NT", f.jqx_dot, contracted=1),
    _float8("fp8 NT fast accum", f.float8_fast),
    _float8("jqx fp8 NT fast accum", f.jqx_dot_fast),
    _float8("jqx fp8 packed", f.jqx_dot, contracted=0, packed=True, needs=PACK_FOR),
    _integer("int8 NN", f.integer),
    _integer("jqx int8 NN", f.jqx_dot),
    *W4A8,
    Variant("bfloat16 NT", "bf16", f.dot, contracted=1),
)
EPILOGUE = (
    BFLOAT16,
    _integer("int8 -> s32", f.integer_product, contracted=1),
    _integer("int8 -> scales -> bf16", f.integer, contracted=1),
    _integer("int8 -> relu, scales -> s8", f.integer_requantized, contracted=1),
    _integer("jqx int8 NT", f.jqx_dot, contracted=1),
)
DYNAMIC = (
    BFLOAT16,
    _integer("dynamic int8", f.dynamic, scheme="dynamic", x=None, contracted=1),
    _integer("jqx dynamic int8", f.jqx_dynamic, scheme="dynamic", x=None, contracted=1),
    _integer("static int8", f.static, scheme="static", x=None, contracted=1),
)
QUANTIZE = (
    Variant("rows to int8", "quantize", f.quantize_rows),
    Variant("jqx rows to int8", "quantize", f.jqx_quantize),
)
DECODE = (
    *(BFLOAT16, *W8, *W4),
    Variant("W4 g128 3D", "W4 g128", f.blocks_3d, w=W4_2D.w),
    Variant("jqx W4 g128", "W4 g128", f.jqx_dot, w=W4_2D.w),
    *W4A8,
)
PITFALLS = (
    BFLOAT16,
    Variant("bf16 x s8, not converted", "W8", f.mixed, w=INT8, contracted=1),
    _integer("s8 x s4, not converted", f.mixed, scheme="W4A8", w=INT4, contracted=1),
    Variant("W8 scaled first", "W8", f.dequantize_first, w=INT8, contracted=1),
    Variant("W8 NT", "W8", f.weight_only, w=INT8, contracted=1),
)
CONVOLUTIONS = (
    Variant(BASELINE, "bf16", f.convolution),
    _integer("int8 -> f32", f.convolution_float32, x=INT8_TENSOR, contracted=1),
    _integer("int8 -> s32", f.convolution_int32, x=INT8_TENSOR, contracted=1),
    _float8("fp8 -> f32", f.convolution_float32, x=FLOAT8_TENSOR, w=FLOAT8),
    _integer("jqx int8", f.jqx_convolution, x=INT8_TENSOR, contracted=1, needs=CONVOLUTION),
)


def _decode(k: int, n: int, *rows: int) -> tuple[Gemm, ...]:
    return tuple(Gemm(m, k, n) for m in rows)


PREFILL_SHAPES = (
    *(Gemm(8192, 8192, 8192), Gemm(2048, 4096, 14336)),
    *(Gemm(2048, 4096, 4096), Gemm(8192, 4096, 14336), Gemm(8192, 4096, 4096)),
)
DECODE_SHAPES = (
    *_decode(8192, 28672, 16, 1),
    *_decode(4096, 14336, 16, 1),
    *_decode(8192, 28672, 64, 4),
    *_decode(4096, 14336, 64, 4),
    *_decode(8192, 28672, 8, 32),
    *_decode(4096, 14336, 8, 32),
)
GROUPS = {
    "copy": Group((Gemm(32768, 8192),), (Variant("copy", "copy", f.negate),), layers=8),
    "prefill": Group(PREFILL_SHAPES, PREFILL, layers=8),
    "decode": Group(DECODE_SHAPES, DECODE),
    "epilogue": Group(PREFILL_SHAPES[:2], EPILOGUE, layers=8),
    "dynamic": Group(PREFILL_SHAPES[:3], DYNAMIC, layers=8),
    "quantize": Group((Gemm(8192, 8192), Gemm(2048, 4096)), QUANTIZE),
    "blocks of 128": Group(
        _decode(4096, 14336, 16, 256, 1, 64, 1024, 4, 8, 32, 128), (BFLOAT16, *_blocks(128), W4_2D)
    ),
    "blocks of 32": Group(_decode(4096, 14336, 16, 256, 1, 1024), (BFLOAT16, *_blocks(32))),
    "blocks of 64": Group(_decode(4096, 14336, 16, 256, 1, 1024), (BFLOAT16, *_blocks(64))),
    "scan": Group((Gemm(16, 4096, 14336),), (BFLOAT16, *W8, *W4), stacked=True),
    "pitfalls": Group((Gemm(2048, 4096, 4096),), PITFALLS, layers=8),
    "conv": Group((Convolution(64, 56, 64), Convolution(64, 14, 256)), CONVOLUTIONS, layers=8),
}
SMOKE = {
    "prefill": Group((Gemm(8, 64, 32),), PREFILL[:2], layers=2),
    "decode": Group((Gemm(1, 64, 32),), (BFLOAT16, W4[2]), layers=2),
}


def rows(groups: dict[str, Group]) -> Iterator[Row]:
    """Yields the first shape of each group with its variants, then the second of each, and so on:
    where time runs out, what is left is what tells least.
    """
    for turn in zip_longest(*(group.shapes for group in groups.values())):
        for (name, group), shape in zip(groups.items(), turn, strict=True):
            if shape is not None:
                for variant in group.variants:
                    yield Row(name, shape, variant, group.layers, group.stacked)
