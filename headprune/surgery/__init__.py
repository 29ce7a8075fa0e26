"""Physical removal of heads, its proof, and checkpoints of what is left."""
