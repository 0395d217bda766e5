"""Sinks: where a pipeline writes to. Each keeps its own progress, in the same commit as the rows."""
