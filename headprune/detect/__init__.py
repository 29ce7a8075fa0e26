"""The search for layouts of attention modules that nobody described."""
