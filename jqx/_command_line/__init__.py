"""`python -m jqx`: one sub-command a file."""

from ._main import main as main
