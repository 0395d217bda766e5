"""Queries as values, and their JSON form."""
