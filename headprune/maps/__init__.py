"""Attention maps: what every head attended to, in which pattern, and as a picture."""
