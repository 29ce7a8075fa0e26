"""Forms of a checkpoint folder: our own, which holds every cut model, and two that load without
this package."""
