"""Errors for options under the names of other libraries, or that the policy or the call has."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..calibrators.calibrator import Calibrator
from ..checks import called
from ..fields import Rule, check_fields, choice, flag, instance, nothing
from ..files import as_path
from ..observers.observer import check_weight

_SIZE = (
    "the policy sets the size of groups: jqx.presets.w4a16(block=32), or the scheme "
    "'int4:group=32'."
)
_FORMAT = "the policy sets the format: jqx.presets.w4a16(), or jqx.Policy({'.*': 'int4'})."
_BATCHES = "pass batches to the result: jqx.ptq(f, policy, algorithm)(params, batches)."
_INSTEAD = {
    **dict.fromkeys(("group_size", "groupsize", "block_size", "blocksize", "group"), _SIZE),
    **dict.fromkeys(("bits", "wbits", "w_bit", "nbits", "n_bits", "qtype", "dtype"), _FORMAT),
    **dict.fromkeys(("sym", "symmetric", "zero_point", "asymmetric"), _FORMAT),
    **dict.fromkeys(("dataset", "calib_data", "data", "samples", "nsamples", "batches"), _BATCHES),
    **dict.fromkeys(("percdamp", "damp_percent", "dampening_frac"), "write damping=."),
    **dict.fromkeys(("desc_act", "act_order", "actorder"), "write order='activation'."),
    **dict.fromkeys(("alpha", "smoothing_strength", "migration_strength"), "write strength=."),
    **dict.fromkeys(("iters", "iterations", "n_iter", "epochs"), "write steps=."),
    **dict.fromkeys(("lr", "minmax_lr"), "write learning_rate=."),
    **dict.fromkeys(("r", "lora_rank", "low_rank"), "write rank=."),
}


def algorithm(name: str, fix: str) -> Callable[[Any], Any]:
    """Returns the decorator of a public algorithm, as `called` does."""

    def decorate(kind: Any) -> Any:
        fields = getattr(kind, "__dataclass_fields__", {})

        def instead(option: str) -> str | None:
            text = _INSTEAD.get(option)
            field = text.removeprefix("write ").partition("=")[0] if text else ""
            is_other = text is not None and text.startswith("write ") and field not in fields
            return None if is_other else text

        return called(f"algorithms.{name}", fix, instead)(kind)

    return decorate


def check_options(name: str, options: Any, **rules: Rule) -> None:
    """Checks the options of an algorithm that chooses codes: those that all of them have, and
    others by rules.
    """
    calibrator, offload = instance(Calibrator) | nothing(), flag() | choice("disk")
    fix = "leave it out for the default."
    check_fields(name, options, fix, calibrator=calibrator, offload=offload, **rules)
    if getattr(options, "checkpoint", None) is not None:
        as_path(name, options.checkpoint)
    check_weight(name, options.weight)


# SciPy, imported at first use, which keeps `import jqx` fast.


@functools.cache
def linalg() -> Any:
    """Returns the module of factorizations and solvers."""
    return importlib.import_module("scipy.linalg")


def components(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the number of the connected component of each of `count` vertices, in the graph with
    edges between `a[i]` and `b[i]`.
    """
    sparse = importlib.import_module("scipy.sparse")
    graphs = importlib.import_module("scipy.sparse.csgraph")
    edges = sparse.coo_matrix((np.ones(len(a), bool), (a, b)), (count, count))
    return graphs.connected_components(edges, directed=False)[1]
