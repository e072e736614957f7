"""Whole swarms of the real programs on this machine."""
