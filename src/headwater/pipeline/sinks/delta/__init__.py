"""Delta Lake as a sink."""
