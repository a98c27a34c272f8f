"""Pictures of the effects of quantization. Each function draws in the axes `ax=`, or in a new
figure, and returns the `matplotlib.figure.Figure`; nothing is shown. `figure.savefig("name.png")`
writes it. Needs matplotlib, from the extra `examples`, which the first use of a function imports.
"""

import typing as _typing

from .._src.late import late as _late

if _typing.TYPE_CHECKING:
    from .._src.diagnostics.plots import front as front
    from .._src.diagnostics.plots import heat_map as heat_map
    from .._src.diagnostics.plots import histogram as histogram
    from .._src.diagnostics.plots import ranges as ranges
    from .._src.diagnostics.plots import sensitivity_bars as sensitivity_bars
    from .._src.diagnostics.plots import sqnr_bars as sqnr_bars
else:
    _NAMES = ("front", "heat_map", "histogram", "ranges", "sensitivity_bars", "sqnr_bars")
    __getattr__, __dir__ = _late(__name__, {"jqx._src.diagnostics.plots": _NAMES})
