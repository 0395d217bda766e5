"""Ranges: the pull model, server side; numbered key ranges with epochs, and bulk reads of rows and changes."""
