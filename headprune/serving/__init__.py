"""Checks that a saved model gives the same answers in every engine that serves it."""
