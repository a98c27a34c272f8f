"""Weights, statistics and messages over several devices."""

from ._shardings import shardings as shardings
