"""Checks that two runs of a query over the same rows give the same answer."""
