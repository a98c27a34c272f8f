"""Colours of pictures and pages that can be told apart with any kind of colour vision."""

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""The palette of Okabe and Ito."""

OTHERS = "#8a8a8a"
"""The colour after the last one of the palette, and of parts that are not quantized."""

ACCENT = "#D55E00"
"""The colour of highlights."""
