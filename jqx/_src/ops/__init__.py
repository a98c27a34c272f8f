"""The specified operators on arrays."""
