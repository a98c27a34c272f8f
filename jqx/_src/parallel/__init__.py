"""Shardings, and collectives that send codes."""
