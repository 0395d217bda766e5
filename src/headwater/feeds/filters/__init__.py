"""Filters: which changes a subscriber receives."""
