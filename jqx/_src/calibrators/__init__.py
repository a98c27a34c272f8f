"""Granularities, and calibrators that turn observed values into scales."""
