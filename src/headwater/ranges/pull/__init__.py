"""Pulls: rows as of an offset, and changes of the log, as pages and Arrow."""
