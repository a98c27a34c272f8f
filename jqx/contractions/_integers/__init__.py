"""The integer arithmetic: sums of codes in int32, and their requantization."""
