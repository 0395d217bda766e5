"""Capture of PostgreSQL: from the replication slot to committed transactions."""
