"""Number formats, round modes, and arithmetic that XLA does not rewrite."""
