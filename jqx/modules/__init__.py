"""Shared parts of the layers of every module library: modes, and functions evaluated in a mode."""

from ._mode import Mode as Mode
