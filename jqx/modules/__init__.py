"""Shared parts of the layers of every module library: modes, and functions evaluated in a mode."""

from ._quantized_function import Mode as Mode
