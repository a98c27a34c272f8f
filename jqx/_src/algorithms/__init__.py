"""Algorithms that choose the codes of weights, and what they share."""
