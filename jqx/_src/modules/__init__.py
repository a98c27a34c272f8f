"""What the layers of linen and nnx share: modes, and functions evaluated in a mode."""
