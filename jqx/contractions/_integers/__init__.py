"""The integer arithmetic: sums of codes in int32, and what becomes of them."""
