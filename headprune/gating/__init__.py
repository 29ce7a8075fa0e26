"""Gates on heads: the same model with a multiplier on every head, for as long as a ``with`` block lasts."""
