"""`python -m jqx`: `_quantize.py` has the sub-commands that write models, `_main.py` all others."""

from ._main import main as main
