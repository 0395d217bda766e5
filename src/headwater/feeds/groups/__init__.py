"""Readers who share a view of the log: the view, the group of its readers, and a batch published to groups."""
