"""What a query on SQLite depends on: the engine's word first, and of the parser's only what the engine confirms."""
