"""Colours of pictures and pages, which differ for all kinds of colour vision."""

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Of Okabe and Ito."""

OTHERS = "#8a8a8a"
"""Of what comes behind the last colour, and of what is not quantized."""

ACCENT = "#D55E00"
"""Of what is to be noticed."""
