"""Checkpoints of cut models: every format of a folder, cuts from file to file, and ONNX."""
