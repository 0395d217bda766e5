"""Rows by key or condition, and a row as an HTTP resource."""
