"""`lax.conv_general_dilated` in NumPy, written without JAX; and the ways to convolve that tests
choose from, with random operands of each.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jqx
from jqx import numerics
from jqx.numerics import Block, Integer, format_of

from ..arrays import on_device
from .blocks import magnitudes, real_values

NHWC = ("NHWC", "HWIO", "NHWC")


def convolution(
    lhs: np.ndarray,
    rhs: np.ndarray,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: tuple[str, str, str] = NHWC,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
) -> np.ndarray:
    """`lax.conv_general_dilated` of NumPy arrays, in their own arithmetic: a sum over the taps."""
    of_lhs, of_rhs, of_result = dimension_numbers
    names = [name for name in of_rhs if name not in "OI"]
    rank, groups, batches = len(names), feature_group_count, batch_group_count
    x = lhs.transpose([of_lhs.index(name) for name in ["N", "C", *names]])
    kernel = rhs.transpose([of_rhs.index(name) for name in ["O", "I", *names]])
    outputs, inputs, *taps = kernel.shape
    apart = rhs_dilation or (1,) * rank
    reach = [(n - 1) * d + 1 for n, d in zip(taps, apart, strict=True)]
    pairs = pads_of(padding, x.shape[2:], reach, window_strides)
    for axis, step, pair in zip(
        range(2, rank + 2), lhs_dilation or (1,) * rank, pairs, strict=True
    ):
        x = _padded(x, axis, step, *pair)
    size = [
        max(0, (n - r) // s + 1) for n, r, s in zip(x.shape[2:], reach, window_strides, strict=True)
    ]
    x = x.reshape(batches, len(x) // batches, groups, inputs, *x.shape[2:])
    kernel = kernel.reshape(batches, groups, outputs // (batches * groups), inputs, *taps)
    total = np.zeros((x.shape[1], *kernel.shape[:3], *size), np.result_type(lhs, rhs))
    for tap in np.ndindex(*taps):
        window = [
            slice(i * d, i * d + n * s, s)
            for i, d, n, s in zip(tap, apart, size, window_strides, strict=True)
        ]
        total += np.einsum("bngi...,bgoi->nbgo...", x[(..., *window)], kernel[(..., *tap)])
    y = total.reshape(x.shape[1], outputs, *size)
    return y.transpose([["N", "C", *names].index(name) for name in of_result])


def pads_of(
    padding: str | Sequence[tuple[int, int]],
    image: Sequence[int],
    reach: Sequence[int],
    strides: Sequence[int],
) -> Sequence[tuple[int, int]]:
    """What "SAME" stands for: as many results as strides begin in the image, the odd zero last."""
    if not isinstance(padding, str):
        return padding
    if padding.upper() == "VALID":
        return [(0, 0)] * len(image)
    pairs = []
    for n, r, s in zip(image, reach, strides, strict=True):
        zeros = max((math.ceil(n / s) - 1) * s + r - n, 0)
        half = zeros // 2
        pairs.append((half, zeros - half) if padding.upper() == "SAME" else (zeros - half, half))
    return pairs


def _padded(x: np.ndarray, axis: int, step: int, low: int, high: int) -> np.ndarray:
    """Zeros between the elements of an axis, and around it; fewer than none cut it."""
    x = np.moveaxis(x, axis, 0)
    wide = np.zeros((max(0, (len(x) - 1) * step + 1), *x.shape[1:]), x.dtype)
    wide[::step] = x
    wide = np.pad(wide, [(max(low, 0), max(high, 0))] + [(0, 0)] * (x.ndim - 1))
    return np.moveaxis(wide[max(-low, 0) : len(wide) - max(-high, 0)], 0, axis)


LAYOUTS = {
    "NHWC": NHWC,
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "crossed": ("HCNW", "WIOH", "CWNH"),
    "one axis": ("NHC", "HIO", "NHC"),
    "three axes": ("NDHWC", "DHWIO", "NDHWC"),
}


PADDINGS: Mapping[str, Any] = {
    "SAME": "SAME",
    "SAME_LOWER": "SAME_LOWER",
    "VALID": "VALID",
    "pairs": ((1, 2), (0, 1), (2, 0)),
    "negative pairs": ((-1, 2), (2, -1), (0, -1)),
}


STEPS = {
    "plain": {},
    "strides": {"window_strides": (2, 1, 2)},
    "holes": {"lhs_dilation": (2, 1, 3)},
    "apart": {"rhs_dilation": (2, 1, 2)},
    "all three": {
        "window_strides": (2, 2, 1),
        "lhs_dilation": (3, 1, 2),
        "rhs_dilation": (2, 1, 2),
    },
}


GROUPS = {
    "one": {},
    "two": {"feature_group_count": 2},
    "depthwise": {"feature_group_count": 4},
    "depthwise, two outputs": {"feature_group_count": 4},
    "of the batch": {"batch_group_count": 2},
}


class Format(NamedTuple):
    """A number format, and how it is used.

    Attributes:
      qtype: the format.
      zero_point: whether there is one for each scale.
      pack: whether codes are packed.
    """

    qtype: Any
    zero_point: bool = False
    pack: bool = False


INTEGERS = {
    "int8": Format(jnp.int8),
    "uint8": Format(jnp.uint8),
    "uint8 with zero points": Format(jnp.uint8, zero_point=True),
    "int4 with zero points, packed": Format(jnp.int4, zero_point=True, pack=True),
}


FORMATS: Mapping[str, Format | None] = {
    **INTEGERS,
    "uint4 with zero points": Format(jnp.uint4, zero_point=True),
    "nf4": Format(numerics.nf4),
    "e4m3": Format(jnp.float8_e4m3fn),
    "mxfp8": Format(numerics.mxfp8_e4m3),
    "float32": None,
    "bfloat16": None,
}
"""By name; `None` for an array of that dtype."""


OF_IMAGES = {
    "tensor": "",
    "batch": "N",
    "batch and features": "NC",
    "batch and input blocks": "Nc",
    "pixels": "NHWD",
}
"""By name: the axes along which each index has its own scale; a small letter stands for blocks."""


OF_KERNELS = {
    "tensor": "",
    "outputs": "O",
    "output blocks": "o",
    "outputs and input blocks": "Oi",
    "taps": "iHWD",
}


TAPS = {"window": (3, 2, 2), "one": (1, 1, 1)}


SIZES = {"small": (4, 6), "large": (0, 38)}
"""By name: features, 0 for as many as make a kernel of 2**14 elements, and outputs."""


class Case(NamedTuple):
    """One way to convolve: a key of each of the tables above."""

    layout: str
    padding: str
    steps: str
    groups: str
    taps: str
    size: str
    left: str
    right: str
    of_image: str
    of_kernel: str

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the convolution."""
        layout = LAYOUTS[self.layout]
        rank = len(layout[0]) - 2
        padding = PADDINGS[self.padding]
        steps = {"window_strides": (1, 1, 1), **STEPS[self.steps]}
        return {
            "padding": padding if isinstance(padding, str) else padding[:rank],
            "dimension_numbers": layout,
            **{name: steps[:rank] for name, steps in steps.items()},
            **GROUPS[self.groups],
        }

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the image and of the kernel."""
        layout, options = LAYOUTS[self.layout], GROUPS[self.groups]
        names = [name for name in layout[1] if name not in "OI"]
        taps = dict(zip(names, TAPS[self.taps], strict=False))
        features, outputs = SIZES[self.size]
        features = features or 4 * math.ceil(2**14 / outputs / math.prod(taps.values()) / 4)
        groups = options.get("feature_group_count", 1)
        if self.groups.startswith("depthwise"):
            outputs = features * (2 if self.groups.endswith("outputs") else 1)
        image = dict(zip(names, (6, 5, 4), strict=False))
        batch = 2 * options.get("batch_group_count", 1)
        image |= {"N": batch, "C": features}
        kernel = taps | {"I": features // groups, "O": outputs}
        return tuple(image[n] for n in layout[0]), tuple(kernel[n] for n in layout[1])

    @property
    def has_integers(self) -> bool:
        """Whether both operands are of integer formats."""
        formats = [FORMATS[name] for name in (self.left, self.right)]
        return all(f is not None and isinstance(format_of(f.qtype), Integer) for f in formats)

    @property
    def products(self) -> int:
        """How many products each element of the result sums."""
        return math.prod(self.shapes[1]) // self.shapes[1][LAYOUTS[self.layout][1].index("O")]

    def operands(
        self, scale: Callable[..., np.ndarray], ends: tuple[str, str] = ("any", "any")
    ) -> Iterator["Operand"]:
        """Random operands; `scale(rng, shape)` makes their scales. `ends` says of each whether its
        codes are all the lowest and its zero points the highest, or the reverse, or any.
        """
        rng = np.random.default_rng([len(field) for field in self])
        names = self.left, self.right
        scaled_axes = OF_IMAGES[self.of_image], OF_KERNELS[self.of_kernel]
        dtype = "bfloat16" if "bfloat16" in names else "float32"
        for axes, shape, name, letters, end in zip(
            LAYOUTS[self.layout][:2], self.shapes, names, scaled_axes, ends, strict=True
        ):
            form = FORMATS[name]
            if form is None:
                yield Operand.of(on_device(rng.normal(size=shape).astype(name)))
            else:
                scales = scale(rng, entries(axes, shape, letters))
                yield qtensor(rng, form, shape, scales, end, dtype=dtype)

    def convolve(self, lhs: Any, rhs: Any, **options: Any) -> jax.Array:
        """The convolution by jqx, of operands packed where their formats say so."""
        pair = [
            x.pack(x.ndim - 1) if form is not None and form.pack else x
            for x, form in zip((lhs, rhs), map(FORMATS.get, (self.left, self.right)), strict=True)
        ]
        return jqx.conv_general_dilated(*pair, **self.options, **options)


def case(left: str, right: str, **choices: str) -> Case:
    """A case that is plain but for its choices."""
    plain = ("NHWC", "SAME", "plain", "one", "window", "small", left, right, "tensor", "tensor")
    return Case(*plain)._replace(**choices)


class Operand(NamedTuple):
    """An operand, and what it stands for in NumPy float64.

    Attributes:
      value: array or QTensor.
      real: its real values.
      apart: their magnitudes where a code and its zero point are summed apart.
    """

    value: Any
    real: np.ndarray
    apart: np.ndarray

    @classmethod
    def of(cls, value: Any) -> "Operand":
        """What an array or QTensor stands for."""
        return cls(value, real_values(value), magnitudes(value))


def entries(axes: str, shape: Sequence[int], scaled: str) -> tuple[int, ...]:
    """The shape of a scale with an entry for each index, or 2 indices, of the axes `scaled`."""
    return tuple(
        n if axis in scaled else max(1, n // 2) if axis.lower() in scaled else 1
        for axis, n in zip(axes, shape, strict=True)
    )


def qtensor(
    rng: np.random.Generator,
    form: Format,
    shape: Sequence[int],
    scales: np.ndarray,
    end: str = "any",
    **fields: Any,
) -> Operand:
    """A QTensor of codes and zero points as `end` says, with a zero point for each scale."""
    qtype = format_of(form.qtype)
    if isinstance(qtype, Block):
        scales = np.exp2(np.round(np.log2(scales))).astype(qtype.scale_qtype)
    other = {"lowest": "highest", "highest": "lowest"}.get(end, "any")
    codes = codes_of(rng, qtype, shape, end)
    zero = codes_of(rng, qtype, scales.shape, other) if form.zero_point else None
    leaves: list[Any] = [x if x is None else on_device(x) for x in (codes, scales, zero)]
    return Operand.of(jqx.QTensor(*leaves, qtype=form.qtype, **fields))


def codes_of(rng: np.random.Generator, form: Any, shape: Sequence[int], end: str) -> np.ndarray:
    """Codes of a format: all the lowest or the highest, or any."""
    limits = {"lowest": form.low, "highest": form.high}
    if end in limits:
        numbers = np.full(shape, int(limits[end]))
    elif isinstance(form, Integer):
        numbers = rng.integers(int(form.low), int(form.high) + 1, shape)
    elif jnp.issubdtype(form.storage, jnp.floating):
        numbers = rng.normal(size=shape)
    else:
        numbers = rng.integers(0, 2**form.bits, shape)
    return numbers.astype(form.storage)


def powers(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """1 or 2: sums of small products stay exact in float32."""
    return rng.integers(1, 3, shape).astype(np.float32)


def uniform(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Scales that all differ."""
    return rng.uniform(0.1, 1, shape).astype(np.float32)


def is_possible(case: Case) -> bool:
    """Whether lax takes the window, the scales of integers can leave their sums, and no case is
    another's twin: an array has no scale.
    """
    quantized = [FORMATS[name] is not None for name in (case.left, case.right)]
    depthwise = case.groups.startswith("depthwise")
    return (
        any(quantized)
        and not (isinstance(PADDINGS[case.padding], str) and "lhs_dilation" in STEPS[case.steps])
        and (quantized[0] or case.of_image == "tensor")
        and (quantized[1] or case.of_kernel == "tensor")
        and (case.size == "small" or not depthwise)
        and (not case.has_integers or _leaves_sum(case))
    )


def _leaves_sum(case: Case) -> bool:
    return (
        case.of_image != "pixels"
        and case.of_kernel != "taps"
        and ("features" not in case.of_image or case.groups.startswith("depthwise"))
        and ("input" not in case.of_image + case.of_kernel or case.groups == "one")
        and ("batch" not in case.of_image or case.groups != "of the batch")
    )


def covering(
    strength: int, possible: Callable[[Case], bool], **tables: Iterable[str]
) -> list[Case]:
    """Cases in which any `strength` choices that are possible together occur together.

    Greedily: each case is the best of some at random that hold a choice not yet seen.
    """
    rng = random.Random(0)
    choices = [list(tables[name]) for name in Case._fields]
    fields = range(len(choices))
    left = {
        (positions, values): None
        for positions in itertools.combinations(fields, strength)
        for values in itertools.product(*(choices[i] for i in positions))
    }
    cases = []

    def new_in(case: Case) -> list[Any]:
        combinations = itertools.combinations(fields, strength)
        keys = ((positions, tuple(case[i] for i in positions)) for positions in combinations)
        return [key for key in keys if key in left]

    def cases_with(positions: Sequence[int], values: Sequence[str]) -> Iterator[Case]:
        for _ in range(200):
            drawn = [rng.choice(names) for names in choices]
            for position, value in zip(positions, values, strict=True):
                drawn[position] = value
            if possible(Case(*drawn)):
                yield Case(*drawn)

    while left:
        key = next(iter(left))
        candidates = list(itertools.islice(cases_with(*key), 20))
        if not candidates:
            del left[key]
            continue
        best = max(candidates, key=lambda case: len(new_in(case)))
        cases.append(best)
        for covered in new_in(best):
            del left[covered]
    return cases
