"""Reads of rows: by key, in key order, as a sample, and in bulk as Arrow."""
