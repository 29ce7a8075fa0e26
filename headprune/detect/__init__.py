"""Search for layouts of attention modules that no layout is registered for."""
