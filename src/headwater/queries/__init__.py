"""Queries of callers: prepared queries with ETags, rows by key, statements and transactions."""
