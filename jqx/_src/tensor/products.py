"""The three products of a layer in training, and how the operands of each are rounded.

    forward:  y  = x w        sums over the inputs
    dgrad:    dx = dy w       sums over the outputs
    wgrad:    dw = x dy       sums over the rows

Operands are in the form [batch, kept, summed], so that one definition serves all three: one scale
per channel is one for each index of `kept`, and groups run along `summed`. These are values that a
rule holds and a plan shows; `train/products.py` computes with them.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..checks import called, check_fields, check_instance, whole
from ..errors import fail
from ..numerics.blocks import Block
from ..numerics.lookup import format_of
from ..numerics.runtimes import ngraph
from ..statistics.granularity import PerTensor, per_group
from .spec import QSpec, needed_spec

RoundingName = Literal["nearest", "stochastic", "eden"]

BATCH, KEPT, SUMMED = 0, 1, 2
"""The axes of an operand."""

FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The diagonal of the Hadamard transform in NVIDIA's recipe, which is the same in each step."""


@called("recipes.Rounded", 'pass a spec first: Rounded("nvfp4", "stochastic").')
@dataclasses.dataclass(frozen=True, init=False)
class Rounded:
    """How one operand of a product is rounded.

    Attributes:
      spec: its format and granularity. Relative granularities refer to the axis that the product
        sums over; absolute ones to the form [batch, kept, summed].
      rounding: `"nearest"`; `"stochastic"`, up or down so that the mean is the value; or `"eden"`,
        to nearest with stochastic scales that make the product unbiased, for formats with scales in
        a float format (nvfp4) in a product with a random Hadamard transform.
      history: for delayed scaling: the scale is that of the largest magnitude in as many earlier
        steps, which the state of training holds. 0 takes that of the current values.
    """

    spec: QSpec
    rounding: RoundingName
    history: int

    def __init__(
        self, spec: QSpec | str, rounding: RoundingName = "nearest", history: int = 0
    ) -> None:
        own = needed_spec("recipes.Rounded", "spec", spec, "array")
        object.__setattr__(self, "spec", own)
        object.__setattr__(self, "rounding", rounding)
        object.__setattr__(self, "history", history)
        check_fields("recipes.Rounded", self, history=whole())
        if self.rounding not in ("nearest", "stochastic", "eden"):
            problem = f"`rounding` is unknown: {self.rounding!r}."
            raise fail("recipes.Rounded", problem, fix="pass 'nearest', 'stochastic' or 'eden'.")
        form = format_of(own.qtype)
        if self.rounding != "nearest" and not (own.symmetric and own.numerics == ngraph):
            problem = f"{self.rounding} rounding is for symmetric specs of jqx's own numerics."
            fix = "pass symmetric=True, and no numerics=, in the spec."
            raise fail("recipes.Rounded", problem, given=str(own), fix=fix)
        if self.rounding == "eden" and not (isinstance(form, Block) and form.two_level):
            problem = f"{form.name} has no scales in a float format, which EDEN rounds."
            raise fail("recipes.Rounded", problem, fix='pass "nvfp4", or rounding="stochastic".')
        plain = self.rounding == "nearest" and own.symmetric and not isinstance(form, Block)
        if self.history and not (plain and isinstance(own.granularity, PerTensor)):
            problem = "delayed scaling is for symmetric specs with one scale, rounded to nearest."
            fix = 'pass a spec such as "float8_e4m3fn:tensor", or history=0.'
            raise fail("recipes.Rounded", problem, given=str(self), fix=fix)

    @property
    def needs_key(self) -> bool:
        """Whether rounding draws random numbers."""
        return self.rounding != "nearest"

    def __str__(self) -> str:
        rounding = "" if self.rounding == "nearest" else f" {self.rounding}"
        return f"{self.spec}{rounding}" + (f" delayed {self.history}" if self.history else "")


Operand = Rounded | np.dtype[Any]
"""A rounded operand, or the float dtype in which it is multiplied."""

OperandLike = Rounded | QSpec | DTypeLike
"""What is given as an operand: also a spec, or a scheme such as `"int8:token"`."""


def as_operand(function: str, argument: str, value: Any) -> Operand:
    """Returns an operand that is given as a `Rounded`, a spec, a scheme or a float dtype."""
    if isinstance(value, Rounded):
        return value
    if _is_float(value):
        return jnp.dtype(value)
    if isinstance(value, (QSpec, str)):
        return Rounded(value)
    problem = f"`{argument}` is neither a spec nor a float dtype: {value!r}."
    fix = 'pass for example "int8:token", a QSpec, recipes.Rounded(...), or jnp.bfloat16.'
    raise fail(function, problem, fix=fix, error=TypeError)


def _is_float(value: Any) -> bool:
    """Whether a value names a float dtype in which products run, of 16 bits or more."""
    if value is None:  # NumPy takes it for float64
        return False
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        return False
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2


Signs = Literal["random", "fixed"]

_LEAST_EDEN = 32
"""The least block of the transform for EDEN. Squared bias of a product of operands with heavy
tails, relative to variance, over 1,024 draws and four pairs: 1.01 to 1.31 at 32, .95 to 1.12 at 64,
.95 to 1.05 at 128, where 1 is unbiased; and 1.5 at 16.
"""


@dataclasses.dataclass(frozen=True, init=False)
class Product:
    """How both operands of a product are rounded.

    Attributes:
      lhs: the first operand; a `Rounded`, a `QSpec`, a scheme, or a float dtype.
      rhs: the second operand.
      hadamard: the size of the blocks of a Hadamard transform along the summed axis of both
        operands, which cancels in the product; 0 means none.
      signs: its signs: `"random"`, drawn in each step, or `"fixed"`, those of NVIDIA's recipe.
    """

    lhs: Operand
    rhs: Operand
    hadamard: int
    signs: Signs

    def __init__(
        self, lhs: OperandLike, rhs: OperandLike, hadamard: int = 0, signs: Signs = "random"
    ) -> None:
        object.__setattr__(self, "lhs", as_operand("recipes.Product", "lhs", lhs))
        object.__setattr__(self, "rhs", as_operand("recipes.Product", "rhs", rhs))
        object.__setattr__(self, "hadamard", hadamard)
        object.__setattr__(self, "signs", signs)
        has_eden = any(isinstance(x, Rounded) and x.rounding == "eden" for x in self.operands)
        is_power = type(self.hadamard) is int and self.hadamard & (self.hadamard - 1) == 0
        if not is_power or self.hadamard < 0:
            problem = f"`hadamard` is not a power of two: {self.hadamard!r}."
            raise fail("recipes.Product", problem, fix="pass 16, 32, 64 or 128; or 0 for none.")
        if self.signs not in ("random", "fixed"):
            problem = f"`signs` is unknown: {self.signs!r}."
            raise fail("recipes.Product", problem, fix="pass 'random' or 'fixed'.")
        if has_eden and self.hadamard < _LEAST_EDEN:
            problem = "EDEN needs a Hadamard transform in blocks of 32 or more: it is biased below."
            facts = f"hadamard == {self.hadamard}"
            raise fail("recipes.Product", problem, given=facts, fix="pass hadamard=128, or 32.")
        if has_eden and self.signs != "random":
            problem = "EDEN needs random signs: it is biased for each fixed transform."
            raise fail("recipes.Product", problem, fix='pass signs="random".')
        if self.hadamard and any(isinstance(x, Rounded) and x.history for x in self.operands):
            problem = "delayed scales are those of operands without a Hadamard transform."
            raise fail("recipes.Product", problem, fix="pass hadamard=0, or history=0.")
        if self.signs == "fixed" and self.hadamard not in (0, len(FIXED_SIGNS)):
            problem = f"there are 16 fixed signs, and blocks of {self.hadamard}."
            raise fail("recipes.Product", problem, fix='pass hadamard=16, or signs="random".')

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Both operands."""
        return self.lhs, self.rhs

    @property
    def draws_signs(self) -> bool:
        """Whether its transform draws random numbers."""
        return bool(self.hadamard) and self.signs == "random"

    @property
    def needs_key(self) -> bool:
        """Whether the product draws random numbers."""
        rounded = [x for x in self.operands if isinstance(x, Rounded)]
        return self.draws_signs or any(x.needs_key for x in rounded)

    def __str__(self) -> str:
        names = [x.name if isinstance(x, np.dtype) else str(x) for x in self.operands]
        transform = f", hadamard {self.hadamard}" if self.hadamard else ""
        return " x ".join(names) + transform


ProductLike = Product | tuple[OperandLike, OperandLike]
"""What is given as a product: also a pair of operands."""


@dataclasses.dataclass(frozen=True, init=False)
class Products:
    """How the three products of a layer are computed in training.

    Attributes:
      forward: `x w`, activations times weights; a `Product`, or a pair of operands.
      dgrad: `dy w`, the gradient of the activations.
      wgrad: `x dy`, the gradient of the weights.
      backward_from: what `dgrad` and `wgrad` round: the operands as `"float"`, or as the forward
        product has `"rounded"` them. Then the backward pass keeps the codes of the forward one, and
        with products in a float dtype the gradients are those of the rounded layer.

    Raises:
      TypeError: if a product is not a `Product` or a pair.
      ValueError: if an operand of the forward product is a float, if `backward_from` is unknown, or
        if both products of an operand have delayed scales of different histories.
    """

    forward: Product
    dgrad: Product
    wgrad: Product
    backward_from: Literal["float", "rounded"]

    def __init__(
        self,
        forward: ProductLike,
        dgrad: ProductLike,
        wgrad: ProductLike,
        backward_from: Literal["float", "rounded"] = "float",
    ) -> None:
        for name, value in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
            product = Product(*value) if isinstance(value, tuple) else value
            fix = "pass a Product, or a pair of operands."
            check_instance("recipes.Products", name, product, Product, fix=fix)
            object.__setattr__(self, name, product)
        object.__setattr__(self, "backward_from", backward_from)
        if self.backward_from not in ("float", "rounded"):
            problem = f"`backward_from` is unknown: {self.backward_from!r}."
            raise fail("recipes.Products", problem, fix="pass 'float' or 'rounded'.")
        for operand in self.forward.operands:
            if not isinstance(operand, Rounded):
                problem = f"the forward product has an operand in {operand}."
                fix = "leave these layers in float: pass None for them in the recipe."
                raise fail("recipes.Products", problem, fix=fix)
        _ = self.histories

    @property
    def needs_key(self) -> bool:
        """Whether one of the products draws random numbers."""
        return any(x.needs_key for x in (self.forward, self.dgrad, self.wgrad))

    @property
    def histories(self) -> dict[str, int]:
        """The lengths of the histories of `x`, `w` and `dy`, of those that have delayed scales."""
        forward, dgrad, wgrad = (x.operands for x in (self.forward, self.dgrad, self.wgrad))
        uses = {
            "x": (forward[0], wgrad[0]),
            "w": (forward[1], dgrad[1]),
            "dy": (dgrad[0], wgrad[1]),
        }
        found = {}
        for name, pair in uses.items():
            lengths = {x.history for x in pair if isinstance(x, Rounded) and x.history}
            if len(lengths) > 1:
                problem = f"the products of {name} have histories of different lengths."
                facts = " and ".join(map(str, sorted(lengths)))
                fix = "pass the same history= in both."
                raise fail("recipes.Products", problem, given=facts, fix=fix)
            found |= dict.fromkeys([name] if lengths else [], *lengths)
        return found

    @property
    def planned(self) -> tuple[QSpec, QSpec]:
        """The specs of activations and weights that a plan shows: those of the forward product."""
        x, w = (_planned(x.spec) for x in self.forward.operands if isinstance(x, Rounded))
        return dataclasses.replace(x, dynamic=True), w

    def __str__(self) -> str:
        names = ("forward", "dgrad", "wgrad")
        return "\n".join(f"{name:7}  {getattr(self, name)}" for name in names)


def _planned(spec: QSpec) -> QSpec:
    """Returns what a plan shows for an operand of a forward product: blocks in the form of the
    product as runs along the axis that it sums over.
    """
    sizes = getattr(spec.granularity, "sizes", None)
    if sizes is None:
        return spec
    size, form = dict(sizes)[SUMMED], format_of(spec.qtype)
    qtype = dataclasses.replace(form, size=size) if isinstance(form, Block) else spec.qtype
    return dataclasses.replace(spec, qtype=qtype, granularity=per_group(size, tail=True))
