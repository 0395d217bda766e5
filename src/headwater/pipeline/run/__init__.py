"""Runs of a pipeline: specification, the loop per table, progress and ownership."""
