"""Rows, statements and transactions for callers; cacheable queries grow here."""
