"""Statistics of arrays: what observers record, and the scales that calibrators compute."""
