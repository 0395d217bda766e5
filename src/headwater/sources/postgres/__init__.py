"""PostgreSQL as a source: logical replication by pgoutput.

frames, pgoutput, types, relations, rows and assembly are pure: bytes in, changes out.
"""
