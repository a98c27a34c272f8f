"""What to contract: the axes of operands, and an operation as the planner sees it."""
