"""Catalogue queries that wait for no lock. Newer servers lock a table to show its default (`pg_get_expr`), and every
published table to list them (`pg_publication_tables`): such queries would wait for any ALTER TABLE."""

from __future__ import annotations

_SCHEMAS = 150000  # the first server version that publishes whole schemas

# An expression on pg_attrdef: whether the default is nextval of a sequence, with or without a cast to a smaller type.
# It matches the server's stored form: nextval is function 1574; 480 casts bigint to integer, 714 to smallint.
COUNTS = r"adbin::text ~ '^(\{FUNCEXPR :funcid (480|714) [^{]*:args \()?\{FUNCEXPR :funcid 1574 '"


def published_sql(version: int, publication: str) -> str:
    """Return a SELECT of the oids of the tables whose rows a publication sends under their own names.

    `publication` is the SQL parameter that holds the publication's name. Pure.
    """
    schemas = (
        "UNION SELECT t.oid FROM pg_publication_namespace s JOIN p ON p.oid = s.pnpubid "
        "JOIN pg_class t ON t.relnamespace = s.pnnspid"
    )
    return f"""
WITH RECURSIVE p AS (
  SELECT oid, puballtables FROM pg_publication WHERE pubname = {publication}
), named (oid) AS (
  SELECT r.prrelid FROM pg_publication_rel r JOIN p ON p.oid = r.prpubid
  {schemas if version >= _SCHEMAS else ""}
), sent (oid) AS (
  SELECT oid FROM named
  UNION SELECT i.inhrelid FROM sent JOIN pg_class t ON t.oid = sent.oid AND t.relkind = 'p'
  JOIN pg_inherits i ON i.inhparent = t.oid
)
SELECT c.oid FROM pg_class c WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid >= 16384
  AND ((SELECT puballtables FROM p) OR c.oid IN (SELECT oid FROM sent))
"""
