"""`pack_for`: the weights of a tree, laid out once for the target that contracts them."""

from typing import Any

import jax
from jax.tree_util import keystr

from .._calls import called
from .._checks import require_that
from .._signatures import T
from ._qtensor import QTensor
from ._shardings import kept
from ._targets import check_target, lay_out_for


@called("pack_for", 'say for what: jqx.pack_for(params, "cpu").')
def pack_for(tree: T, target: str, *, contracted: int | None = None) -> T:
    """Lays out every QTensor of a tree as a target contracts it fastest.

    Once, at load: files keep the plain layout. The real arrays stay what they are, and so do shape,
    scale and zero point; `unpack` takes the layout back, bit for bit.

    ==============  =============================  ==============================================
    target          scales per channel, or one     scales in blocks along the contracted axis
    ==============  =============================  ==============================================
    "cpu"           [N, K], contracted axis last   [K, N], contracted axis before the other
    "gpu", "h200"   [N, K]                         [K, N], for a kernel
    "tpu", by name  [K, N], for a kernel           [K, N], for a kernel
    ==============  =============================  ==============================================

    On CPU, integers of 8 bits or fewer lie as int8 (those of `jnp.uint8` less 128), `jnp.int4` in a
    byte each; elsewhere codes keep their dtype. Packed codes are unpacked. Where the package
    jqx-cpu is installed and used (see its README for processors), weights with one scale or with
    blocks lie [N, K]: integers of 8, 4 and 2 bits, codes of floats of 4 bits, and 8-bit floats;
    those of fewer than 8 bits are packed along K. What is on several devices, or parted over
    devices by a compiler, is computed without its kernels, and so is what is exported, outside of
    `jqx.kernels_in_exports`.

    Kernels in Pallas read the codes in the bits that they have. They are for integers of 8 bits
    or fewer, float8_e4m3fn and float8_e5m2, in blocks that divide the axis, and for codes of 4 bits
    or fewer that are looked up, float4 and codebooks, with any scale: those lie as uint4 (float4 on
    TPU7x as it is). On a GPU codes of 2 bits have none, nor have those of 4 bits where an axis is
    no multiple of 16; on a TPU those of 2 bits where N is no multiple of 128. Beside floats each
    weight is rounded to their dtype once it is scaled; an activation that `convert` quantizes is
    quantized in the kernel. Where no kernel is for a weight, or on another platform than the
    target's, it is contracted as without; `jqx.explain` tells. `jax.export` of a function that
    would run a kernel in Pallas is an error, and so is a program that a compiler parts over
    devices.

    Args:
      tree: any pytree with QTensors of any shape and dtype, or a QTensor; its other leaves stay.
        The arrays may be `jax.ShapeDtypeStruct`. The last two axes of a QTensor are its matrix: one
        of fewer axes is returned as it is, and so is one that lies as the target wants it. Where
        each index of both has its own scale, neither can be contracted: their order stays.
      target: `"cpu"`, `"gpu"` or `"tpu"`, as `jax.default_backend()` names it, or a machine as
        `jqx.lowering` does: `"h200"`, `"tpu-v5e"`, `"tpu-v6e"`, `"tpu7x"`.
      contracted: the axis to be contracted, -2 or -1, for QTensors whose scales do not tell; `None`
        takes -2, as in `x @ w`. Scales tell where one of the two axes has a scale for each index
        (the other is contracted), or else where one alone has blocks (it is).

    Returns:
      The same tree, with QTensors of the same shapes, dtypes and formats.

    Raises:
      ValueError: the tree holds no QTensor; the target is unknown; `contracted` is neither of the
        last two axes, or contradicts a scale.

    Gradient: by JAX, of scales; none of codes.
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
    require_that(
        any(_is_quantized(leaf) for _, leaf in flat),
        error=ValueError,
        function="pack_for",
        problem="there is no QTensor to lay out.",
        given=f"a tree of {len(flat)} leaves" if flat else "a tree without leaves",
        expected="one QTensor or more among them",
        mend="pass what jqx.quantize_params returns.",
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
