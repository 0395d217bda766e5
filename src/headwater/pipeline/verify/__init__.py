"""Verification of a sink against source and log."""
