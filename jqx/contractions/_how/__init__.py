"""How to contract: the formulations, the order in which they are tried, and their parts."""
