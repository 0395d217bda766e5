"""Capture of SQLite: triggers, the capture table, and what reads it."""
