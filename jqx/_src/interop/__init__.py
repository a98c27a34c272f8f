"""Files of jqx, and checkpoints of other libraries."""
