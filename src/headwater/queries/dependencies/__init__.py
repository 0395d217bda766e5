"""Matching of changes to the queries whose answers they may change."""
