"""`pack_for`: lays out the weights of a tree once for the target that contracts them."""

from typing import Any

import jax
from jax.tree_util import keystr

from .._calls import called
from .._errors import fail
from .._signatures import T
from ._qtensor import QTensor
from ._shardings import kept
from ._targets import check_target, lay_out_for


@called("pack_for", 'pass a target: jqx.pack_for(params, "cpu").')
def pack_for(tree: T, target: str, *, contracted: int | None = None) -> T:
    """Gives every QTensor of a tree the memory layout that a target contracts fastest.

    Call it once, after loading: files keep the default layout. The real arrays, shape, scale and
    zero point do not change; `unpack` restores the default layout, bit for bit.

    ==============  =============================  ==============================================
    target          scales per channel, or one     scales in blocks along the contracted axis
    ==============  =============================  ==============================================
    "cpu"           [N, K], contracted axis last   [K, N], contracted axis before the other
    "gpu", "h200"   [N, K]                         [K, N], for a kernel
    "tpu", by name  [K, N], for a kernel           [K, N], for a kernel
    ==============  =============================  ==============================================

    On CPU, integers of 8 bits or fewer are stored as int8 (`jnp.uint8` minus 128), and `jnp.int4`
    in one byte per code; elsewhere codes keep their dtype. Packed codes are unpacked. If the
    package jqx-cpu is installed and used (see its README for processors), weights with one scale or
    with blocks are stored as [N, K]: integers of 8, 4 and 2 bits, codes of 4-bit floats, and 8-bit
    floats; codes of fewer than 8 bits are packed along K. The kernels of jqx-cpu are not used for
    arrays on several devices, for programs that a compiler partitions over devices, or in exported
    functions outside of `jqx.kernels_in_exports`.

    Pallas kernels read the codes without widening them in memory. They support integers of 8 bits
    or fewer, float8_e4m3fn and float8_e5m2, in blocks that divide the axis. They also support codes
    of 4 bits or fewer that are looked up (float4 and codebooks), with any scale, which are stored
    as uint4 (on TPU7x, float4 keeps its dtype). On a GPU there is no kernel for 2-bit codes, nor
    for 4-bit codes if an axis is not a multiple of 16; on a TPU there is none for 2-bit codes if N
    is not a multiple of 128. With float activations, each weight is scaled and then rounded to
    their dtype; an activation that `convert` quantizes is quantized in the kernel. If no kernel
    supports a weight, or on a platform other than the target, the contraction runs without a
    kernel; `jqx.explain` shows which one is used. It is an error to `jax.export` a function that
    would run a Pallas kernel, or to run it in a program that a compiler partitions over devices.

    Args:
      tree: any pytree with QTensors of any shape and dtype, or a QTensor; other leaves do not
        change. The arrays may be `jax.ShapeDtypeStruct`. The last two axes of a QTensor are its
        matrix. A QTensor of fewer axes is returned as it is, and so is one that already has the
        layout of the target. If each index of both axes has its own scale, neither can be
        contracted, and they keep their order.
      target: `"cpu"`, `"gpu"` or `"tpu"`, as `jax.default_backend()` names it, or a machine as in
        `jqx.lowering`: `"h200"`, `"tpu-v5e"`, `"tpu-v6e"`, `"tpu7x"`.
      contracted: the axis to be contracted, -2 or -1, for QTensors whose scales do not determine
        it; `None` means -2, as in `x @ w`. The scales determine it if one of the two axes has a
        scale for each index (the other one is contracted), or else if only one of them has blocks
        (this one is contracted).

    Returns:
      The same tree, with QTensors of the same shapes, dtypes and formats.

    Raises:
      ValueError: the tree holds no QTensor; the target is unknown; `contracted` is neither of the
        last two axes, or contradicts a scale.

    Gradient: JAX differentiates it with respect to scales; codes have no gradient.
    NaN and infinities: kept; nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((4, 3)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> packed = jqx.pack_for({"w": w, "b": jnp.zeros(3)}, "cpu")["w"]
      >>> packed.shape, packed.values.shape, packed.layout.swapped
      ((4, 3), (3, 4), True)
    """
    check_target("pack_for", target, contracted)
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantized)
    if not any(_is_quantized(leaf) for _, leaf in flat):
        raise fail(
            "pack_for",
            "there is no QTensor to lay out.",
            given=f"a tree of {len(flat)} leaves" if flat else "a tree without leaves",
            expected="one QTensor or more among them",
            fix="pass what jqx.quantize_params returns.",
        )
    leaves = []
    for path, leaf in flat:
        if _is_quantized(leaf):
            place = f" at {keystr(path, simple=True, separator='/')!r}" if path else ""
            laid_out = lay_out_for("pack_for", leaf, target, contracted, place)
            leaf = kept("pack_for", leaf, laid_out, keystr(path, simple=True, separator="/"))
        leaves.append(leaf)
    return jax.tree.unflatten(structure, leaves)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)
