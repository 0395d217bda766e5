"""Tables and views as defined in SQLite's schema."""
