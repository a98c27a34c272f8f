"""The ways to convolve that tests choose from, and random operands of each."""

import functools
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
from .convolutions import NHWC

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
        names, own = (self.left, self.right), (OF_IMAGES[self.of_image], OF_KERNELS[self.of_kernel])
        dtype = "bfloat16" if "bfloat16" in names else "float32"
        for axes, shape, name, letters, end in zip(
            LAYOUTS[self.layout][:2], self.shapes, names, own, ends, strict=True
        ):
            form = FORMATS[name]
            if form is None:
                yield array(rng, shape, name)
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


def entries(axes: str, shape: Sequence[int], own: str) -> tuple[int, ...]:
    """The shape of a scale with an entry for each index of the axes `own`, or for blocks of 2."""
    return tuple(
        n if axis in own else max(1, n // 2) if axis.lower() in own else 1
        for axis, n in zip(axes, shape, strict=True)
    )


def array(rng: np.random.Generator, shape: Sequence[int], dtype: str = "float32") -> Operand:
    """A random array."""
    x = rng.normal(size=shape).astype(dtype)
    real = x.astype(np.float64)
    return Operand(on_device(x), real, np.abs(real))


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
    value = jqx.QTensor(*leaves, qtype=form.qtype, **fields)
    levels = levels_of(qtype)
    numbers = codes.astype(np.float64) if levels is None else levels[codes]
    zeros = 0.0 if zero is None else spread(zero, shape)
    scales = spread(scales, shape)
    return Operand(
        value, (numbers - zeros) * scales, (np.abs(numbers) + np.abs(zeros)) * np.abs(scales)
    )


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


@functools.cache
def levels_of(form: Any) -> np.ndarray | None:
    """The numbers of a codebook; `None` where codes are numbers."""
    if isinstance(form, Integer) or jnp.issubdtype(form.storage, jnp.floating):
        return None
    return np.asarray(form.decode(jnp.arange(2**form.bits, dtype=form.storage)), np.float64)


def spread(parameter: Any, shape: Sequence[int]) -> np.ndarray:
    """A scale or zero point with one entry for each element, in float64."""
    parameter = np.asarray(parameter).astype(np.float64)
    for axis, n in enumerate(shape):
        parameter = np.repeat(parameter, n // parameter.shape[axis], axis)
    return parameter


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
    left = {
        (places, values): None
        for places in itertools.combinations(range(len(choices)), strength)
        for values in itertools.product(*(choices[i] for i in places))
    }
    cases = []

    def found_in(case: Case) -> list[Any]:
        combinations = itertools.combinations(range(len(case)), strength)
        keys = ((places, tuple(case[i] for i in places)) for places in combinations)
        return [key for key in keys if key in left]

    def some_with(places: Sequence[int], values: Sequence[str]) -> Iterator[Case]:
        for _ in range(200):
            fields = [rng.choice(some) for some in choices]
            for place, value in zip(places, values, strict=True):
                fields[place] = value
            if possible(Case(*fields)):
                yield Case(*fields)

    while left:
        key = next(iter(left))
        some = list(itertools.islice(some_with(*key), 20))
        if not some:
            del left[key]
            continue
        best = max(some, key=lambda case: len(found_in(case)))
        cases.append(best)
        for seen in found_in(best):
            del left[seen]
    return cases
