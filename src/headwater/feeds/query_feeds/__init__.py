"""Feeds of queries: invalidations instead of changes."""
