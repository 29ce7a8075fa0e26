"""What the verbs above need of a model: find its sites, cut its tensors, run it on batches, cost
it, fingerprint it."""
