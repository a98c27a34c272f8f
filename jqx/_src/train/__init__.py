"""Training in low precision: the products of layers and of their gradients, rounded."""
