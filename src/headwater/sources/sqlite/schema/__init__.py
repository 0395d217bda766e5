"""Tables and views as the schema of SQLite has them."""
