"""The log on disk: blocks, their codec, the SQLite file and its retention."""
