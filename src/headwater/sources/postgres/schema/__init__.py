"""Tables, types and definitions as the catalog of PostgreSQL has them."""
