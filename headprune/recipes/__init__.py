"""Recipes: their schema, how they are read and checked, and presets of papers."""
