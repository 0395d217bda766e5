"""Sinks: the destinations of a pipeline. Most commit their progress together with the rows."""
