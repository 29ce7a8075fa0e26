"""Data and models of a recipe: rows, encodings, labels, splits, and models by path."""
