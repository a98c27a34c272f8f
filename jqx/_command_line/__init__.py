"""`python -m jqx`: one file for each sub-command."""

from ._main import main as main
