"""How it is contracted: the formulations, the order in which they are tried, and their parts."""
