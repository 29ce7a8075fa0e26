"""Checkpoints of cut models: folders in three formats, cuts on disk, and ONNX."""
