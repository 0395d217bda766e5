"""Databases we can describe, follow, read and write; `source.py` is the promise, each folder keeps it."""
