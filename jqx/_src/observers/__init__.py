"""Statistics of activations that algorithms read."""
