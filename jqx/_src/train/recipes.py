"""Recipes for training in low precision, each with its constants and its source."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from ... import Policy, QSpec, Rule, per_block, per_channel, per_group, per_tensor
from ...calibrators import ceil, four_over_six
from ...extend import Granularity
from ...numerics import Block, mxfp8_e4m3
from ...numerics import nvfp4 as nvfp4_format
from ..checks import check_instance
from ..tensor.products import BATCH, KEPT, SUMMED, OperandLike, Product, Products, Rounded

Exclude = str | Sequence[str]
"""Regular expressions of paths that stay in float: one, or several."""


@dataclasses.dataclass(frozen=True, init=False)
class Recipe:
    """How a function is trained in low precision: the three products of each layer.

    Args:
      name: its name, for messages.
      rules: for regular expressions of paths, matched in order and in full as those of a
        `jqx.Rule`, the `Products` of these layers, or `None` for layers that stay in float.

    Attributes:
      policy: what `jqx.make_plan` needs: a `jqx.Rule` with these products for each path.

    Raises:
      TypeError: if `rules` is not a dict of `Products` or `None`.

    Example:
      >>> import jqx
      >>> row = jqx.QSpec("int8", jqx.per_channel())
      >>> products = jqx.recipes.Products((row, row), (row, row), ("bfloat16", "bfloat16"))
      >>> print(jqx.recipes.Recipe("mine", {"head": None, ".*": products}))
      mine
      head  float
      .*    forward  int8 per_channel x int8 per_channel
            dgrad    int8 per_channel x int8 per_channel
            wgrad    bfloat16 x bfloat16
    """

    name: str
    rules: tuple[tuple[str, Products | None], ...]
    policy: Policy = dataclasses.field(compare=False)

    def __init__(self, name: str, rules: Mapping[str, Products | None]) -> None:
        fix = 'pass a dict, such as {"head": None, ".*": products}.'
        check_instance("recipes.Recipe", "rules", rules, Mapping, fix=fix)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "rules", tuple(rules.items()))
        object.__setattr__(self, "policy", Policy(_rule(*item) for item in self.rules))

    def __str__(self) -> str:
        width = max(len(path) for path, _ in self.rules) if self.rules else 0
        lines = [self.name]
        for path, products in self.rules:
            first, *others = ["float"] if products is None else str(products).splitlines()
            lines += [f"{path:{width}}  {first}", *(" " * (width + 2) + x for x in others)]
        return "\n".join(lines)

    @property
    def needs_key(self) -> bool:
        """Whether training draws random numbers."""
        return any(products is not None and products.needs_key for _, products in self.rules)


def _rule(path: str, products: Products | None) -> Rule:
    """Returns the rule of a policy for the layers of a rule."""
    if products is not None:
        name = f"rules[{path!r}]"
        check_instance("recipes.Recipe", name, products, Products, fix="pass Products.")
    return Rule(path, products=products)


def _everywhere(name: str, products: Products, exclude: Exclude) -> Recipe:
    """Returns a recipe for all layers but some."""
    left = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    rules: dict[str, Products | None] = dict.fromkeys(left)
    rules.setdefault(".*", products)  # all layers may be left out
    return Recipe(name, rules)


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

_SQUARE = Block(jnp.float4_e2m1fn, 256, "nvfp4_16x16", scale_qtype=E4M3)
"""NVFP4 in blocks of 16 by 16, which are the same in both products that read a weight."""


def int8(*, exclude: Exclude = (), wgrad: OperandLike = jnp.bfloat16) -> Recipe:
    """int8 with one scale for each row of an operand, and the gradient of weights in 16 bits, from
    the codes of the forward product.

    Args:
      exclude: regular expression, or several, of paths to leave in float.
      wgrad: both operands of the product that gives the gradient of weights: a float dtype; or, for
        three integer products, `"int8:group=128"`, in runs of 128 rows with a scale each.

    Source: Wortsman et al., "Stable and low-precision training for large-scale vision-language
      models" (SwitchBack), arXiv:2304.13013; the runs are the sub-channels of AQT.

    Example:
      >>> import jqx
      >>> print(jqx.recipes.int8())
      int8
      .*  forward  int8 per_channel x int8 per_channel
          dgrad    int8 per_channel x int8 per_channel
          wgrad    bfloat16 x bfloat16
    """
    row = QSpec(jnp.int8, per_channel())
    products = Products((row, row), (row, row), (wgrad, wgrad), backward_from="rounded")
    return _everywhere("int8", products, exclude)


def fp8(*, exclude: Exclude = ()) -> Recipe:
    """8-bit floats with one scale for each tensor, from its current values: e4m3, and e5m2 for the
    gradients of results.

    Args:
      exclude: regular expression, or several, of paths to leave in float.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; the current
      scaling of TransformerEngine.

    Example:
      >>> import jqx
      >>> print(jqx.recipes.fp8(exclude="head"))
      fp8
      head  float
      .*    forward  float8_e4m3fn per_tensor x float8_e4m3fn per_tensor
            dgrad    float8_e5m2 per_tensor x float8_e4m3fn per_tensor
            wgrad    float8_e4m3fn per_tensor x float8_e5m2 per_tensor
    """
    e4m3, e5m2 = QSpec(E4M3, per_tensor()), QSpec(E5M2, per_tensor())
    return _everywhere("fp8", Products((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)), exclude)


def fp8_delayed(*, exclude: Exclude = (), history: int = 1024) -> Recipe:
    """8-bit floats as in `fp8`, with scales from the largest magnitudes of earlier steps. The state
    of training holds them; until it does, the scales are those of the current values.

    Args:
      exclude: regular expression, or several, of paths to leave in float.
      history: the number of steps; 1 takes the scale of the last one.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; the delayed
      scaling of TransformerEngine and flax, whose history is 1,024 too.

    Example:
      >>> import jqx
      >>> print(jqx.recipes.fp8_delayed(history=16).rules[0][1].forward)
      float8_e4m3fn per_tensor delayed 16 x float8_e4m3fn per_tensor delayed 16
    """
    e4m3, e5m2 = (Rounded(QSpec(x, per_tensor()), history=history) for x in (E4M3, E5M2))
    products = Products((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2))
    return _everywhere("fp8_delayed", products, exclude)


def fp8_rowwise(*, exclude: Exclude = ()) -> Recipe:
    """8-bit floats with one scale for each row of an operand: e4m3 everywhere.

    Args:
      exclude: regular expression, or several, of paths to leave in float.

    Source: torchao's float8 training, rowwise.

    Example:
      >>> import jqx
      >>> print(jqx.recipes.fp8_rowwise())
      fp8_rowwise
      .*  forward  float8_e4m3fn per_channel x float8_e4m3fn per_channel
          dgrad    float8_e4m3fn per_channel x float8_e4m3fn per_channel
          wgrad    float8_e4m3fn per_channel x float8_e4m3fn per_channel
    """
    row = QSpec(E4M3, per_channel())
    return _everywhere("fp8_rowwise", Products((row, row), (row, row), (row, row)), exclude)


def fp8_block(*, exclude: Exclude = (), block: int = 128) -> Recipe:
    """8-bit floats in blocks: e4m3, 1 x 128 along the sum for activations and gradients, 128 x 128
    for weights.

    Args:
      exclude: regular expression, or several, of paths to leave in float.
      block: the size of the blocks.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2.

    Example:
      >>> import jqx
      >>> jqx.recipes.fp8_block(exclude="head").rules[0]
      ('head', None)
    """
    run = QSpec(E4M3, per_group(block, tail=True))
    square = QSpec(E4M3, _square(block))
    return _everywhere("fp8_block", Products((run, square), (run, square), (run, run)), exclude)


def mxfp8(*, exclude: Exclude = ()) -> Recipe:
    """MXFP8: e4m3 in blocks of 32 along the sum of each product, with scales that clip no value.

    Args:
      exclude: regular expression, or several, of paths to leave in float.

    Source: Mishra et al., "Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027.

    Example:
      >>> import jqx
      >>> jqx.recipes.mxfp8().needs_key
      False
    """
    run = QSpec(mxfp8_e4m3, per_group(32, tail=True), calibrator=ceil)
    return _everywhere("mxfp8", Products((run, run), (run, run), (run, run)), exclude)


def nvfp4(*, exclude: Exclude = ()) -> Recipe:
    """NVFP4 as NVIDIA trains with it: weights in blocks of 16 x 16, the rest in blocks of 16 along
    the sum; gradients of results rounded stochastically; and a Hadamard transform of 16 in the
    product that gives the gradient of weights.

    Leave the first and the last layers out, as the source does: about 15 % of the weights.

    Args:
      exclude: regular expression, or several, of paths to leave in float.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.

    Example:
      >>> import jqx
      >>> recipe = jqx.recipes.nvfp4(exclude=["layers[-1]", "head"])
      >>> [path for path, _ in recipe.rules]
      ['layers[-1]', 'head', '.*']
    """
    run = QSpec(nvfp4_format, per_group(16, tail=True))
    square = QSpec(_SQUARE, _square(16))
    dy = Rounded(run, "stochastic")
    products = Products((run, square), (dy, square), Product(run, dy, hadamard=16, signs="fixed"))
    return _everywhere("nvfp4", products, exclude)


def quartet2(*, exclude: Exclude = (), hadamard: int = 128) -> Recipe:
    """Quartet II: NVFP4, forward to nearest with the better of two scales; backward by MS-EDEN,
    which is unbiased, from the operands as the forward product has rounded them.

    Args:
      exclude: regular expression, or several, of paths to leave in float.
      hadamard: the size of the blocks of the transform, 32 or more. Blocks of 32 are a little
        biased if operands have outliers.

    Source: Panferov et al., "Quartet II", arXiv:2601.22813.

    Example:
      >>> import jqx
      >>> jqx.recipes.quartet2().needs_key
      True
    """
    forward = QSpec(nvfp4_format, per_group(16, tail=True), calibrator=four_over_six)
    eden = Rounded(QSpec(nvfp4_format, per_group(16)), "eden")
    backward = Product(eden, eden, hadamard=hadamard)
    products = Products((forward, forward), backward, backward, backward_from="rounded")
    return _everywhere("quartet2", products, exclude)


def _square(size: int) -> Granularity:
    """Returns blocks that are as high as they are wide, in the form [batch, kept, summed]."""
    return per_block({BATCH: 1, KEPT: size, SUMMED: size}, tail=True)
