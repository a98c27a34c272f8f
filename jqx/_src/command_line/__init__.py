"""`python -m jqx`: `quantize.py` has the sub-commands that write models, `main.py` all others."""
