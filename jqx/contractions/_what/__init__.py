"""What is contracted: the axes of operands, and an operation as planning sees it."""
