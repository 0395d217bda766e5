"""Patches: the difference between two answers of a query."""
