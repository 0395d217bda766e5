"""Feeds of query instances, which deliver invalidations instead of changes."""
