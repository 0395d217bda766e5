"""Dependencies of a query on SQLite: reported by the engine, narrowed by the parser where the engine confirms."""
