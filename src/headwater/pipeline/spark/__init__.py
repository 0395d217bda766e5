"""Spark: its session, the data source `headwater`, schemas and errors."""
