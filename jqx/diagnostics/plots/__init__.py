"""Pictures of what quantization does. Each function draws in the axes it is given, `ax=`, or in a
figure of its own, and returns the `matplotlib.figure.Figure`; nothing is shown.
`figure.savefig("name.png")` writes it. Needs matplotlib, of the extra `examples`.
"""

from ._bars import sensitivity_bars as sensitivity_bars
from ._bars import sqnr_bars as sqnr_bars
from ._boxes import ranges as ranges
from ._front import front as front
from ._heat_map import heat_map as heat_map
from ._histogram import histogram as histogram
