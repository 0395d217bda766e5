"""SQL databases as a sink."""
