"""Sweeps: one recipe over a grid of settings, the table of results, and `pick`."""
