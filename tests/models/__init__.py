"""Functions and weights that tests of several folders quantize."""
