"""Conditions that must hold for a row to matter to a query."""
