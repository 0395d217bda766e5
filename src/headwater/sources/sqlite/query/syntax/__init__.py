"""The parser of SQLite's SELECT: tokens, tree, names, and the tree as SQL again."""
