"""What a statement depends on: PostgreSQL parses it, and its own tree is read."""
