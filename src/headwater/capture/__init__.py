"""Capture of changes from a source into the log: the follow loop, crash safety, and new generations."""
