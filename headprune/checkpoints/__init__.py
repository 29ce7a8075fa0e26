"""Checkpoints of cut models: folders in four formats, cuts on disk, and ONNX."""
