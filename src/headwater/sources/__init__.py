"""Databases that can be captured, read, queried and written; each folder implements the protocol in `source.py`."""
