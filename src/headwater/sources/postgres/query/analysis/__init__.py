"""The dependencies of a statement, read from the tree that PostgreSQL parses it to."""
