"""Reads of rows: in key order, as a sample, and in bulk."""
