"""Estimators of the gradient of rounding."""
