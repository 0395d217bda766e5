"""Change feeds of key spans."""
