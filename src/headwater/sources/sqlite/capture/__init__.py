"""Capture of SQLite: the triggers, the capture table and its readers."""
