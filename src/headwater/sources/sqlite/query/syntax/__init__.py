"""Parser of SQLite's SELECT: tokens, tree, name resolution, and rendering of the tree as SQL."""
