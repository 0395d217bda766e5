"""The replication slot, its publication, and the log that belongs to it."""
