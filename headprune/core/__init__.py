"""Frozen values, the registry and the head-to-row arithmetic; standard library only."""
