"""Parquet files as a sink."""
