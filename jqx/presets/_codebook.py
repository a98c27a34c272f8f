"""Presets of codebooks."""

from ..numerics import nf4 as nf4_codes
from ..policy import Policy
from ..tensor import QSpec
from ._preset import NONE, Exclude, Fields, Tables, blocks, policy, preset


@preset
def nf4(
    path: str = ".*",
    *,
    block: int = 64,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
) -> Policy:
    """Returns a policy with NF4 weights in blocks; activations stay in the model's float dtype.

    The base weights of QLoRA (Dettmers et al., arXiv:2305.14314), without the second quantization
    of their scales.

    Example:
      >>> import jqx
      >>> str(jqx.presets.nf4().rules[0].weight)
      'nf4 per_group(64, tail=True)'
    """
    return policy(
        "nf4",
        path,
        exclude,
        QSpec(nf4_codes, blocks("nf4", block, 64, weight)),
        None,
        tables,
        weight,
    )
