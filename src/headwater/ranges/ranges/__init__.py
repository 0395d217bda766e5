"""Key ranges of a table: split, lease, epochs."""
