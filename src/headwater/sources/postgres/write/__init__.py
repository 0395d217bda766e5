"""Writes through the server: sessions, transactions and the writer threads."""
