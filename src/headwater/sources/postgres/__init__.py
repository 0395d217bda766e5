"""PostgreSQL as a source: logical replication by pgoutput.

replication_frames, pgoutput, types, relations, row decoders and transaction_assembly are pure: bytes in, changes out.
"""
