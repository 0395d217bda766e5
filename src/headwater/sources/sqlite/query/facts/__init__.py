"""Conditions that a row must satisfy to affect the result of a query."""
