"""The dependencies of a query, which columns and rows it reads, and their description in words."""
