"""Errors for options under the names of other libraries, or that the policy or the call has."""

from collections.abc import Callable
from typing import Any

from .._calls import called

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
        own = getattr(kind, "__dataclass_fields__", {})

        def instead(option: str) -> str | None:
            text = _INSTEAD.get(option)
            field = text.removeprefix("write ").partition("=")[0] if text else ""
            is_other = text is not None and text.startswith("write ") and field not in own
            return None if is_other else text

        return called(f"algorithms.{name}", fix, instead)(kind)

    return decorate
