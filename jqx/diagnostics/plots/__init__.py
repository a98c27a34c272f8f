"""Pictures of the effects of quantization. Each function draws in the axes `ax=`, or in a new
figure, and returns the `matplotlib.figure.Figure`; nothing is shown. `figure.savefig("name.png")`
writes it. Needs matplotlib, from the extra `examples`, which the first use of a function imports.
"""

import typing as _typing

from ..._late import late as _late
from ..._old_names import renamed as _renamed

if _typing.TYPE_CHECKING:
    from ._bars import sensitivity_bars as sensitivity_bars
    from ._bars import sqnr_bars as sqnr_bars
    from ._boxes import ranges as ranges
    from ._front import front as front
    from ._heat_map import heat_map as heat_map
    from ._histogram import histogram as histogram
else:
    __getattr__, __dir__ = _late(
        __name__,
        {
            "_bars": ("sensitivity_bars", "sqnr_bars"),
            "_boxes": ("ranges",),
            "_front": ("front",),
            "_heat_map": ("heat_map",),
            "_histogram": ("histogram",),
        },
        _renamed(__name__, {}),
    )
