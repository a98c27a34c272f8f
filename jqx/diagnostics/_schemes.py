"""Short names of formats: those of sites, and those of weights in pictures."""

import re

from ..numerics._shared import name_of_qtype
from ..tensor import QTensor
from ..transforms import Site

_BLOCK = re.compile(r"per_block\(\{([^}]*)\}\)")


def scheme_of_site(site: Site) -> str:
    """Returns how the operands of a site are quantized: `float x int4 per_group(32)`."""
    return " x ".join(str(operand.spec) if operand.spec else "float" for operand in site.operands)


def scheme_of_tensor(q: QTensor) -> str:
    """Returns how a tensor is quantized: `int4 per_block({0: 32, 1: 1}), zero points`."""
    zeros = "" if q.zero_point is None else ", zero points"
    return f"{name_of_qtype(q.qtype)} {q.groups}{zeros}"


def short_scheme(scheme: str) -> str:
    """Returns a scheme in which blocks along one axis are groups: `int4 per_group(32)`."""

    def grouped(found: re.Match[str]) -> str:
        sizes = [part.split(":")[1].strip() for part in found[1].split(",") if ":" in part]
        long = [size for size in sizes if size != "1"]
        return f"per_group({long[0]})" if len(long) == 1 else found[0]

    return _BLOCK.sub(grouped, scheme).replace(", tail=True", "")
