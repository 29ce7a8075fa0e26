"""Frozen values, the registry and the head-to-row arithmetic; imports only the standard library."""
