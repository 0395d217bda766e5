"""Questions to the catalogue that wait for nobody. Newer servers lock a table to show a default of it (`pg_get_expr`),
and every published table to list them (`pg_publication_tables`): they would wait for whoever alters one."""

from __future__ import annotations

_SCHEMAS = 150000  # the first server that publishes whole schemas

# An expression on pg_attrdef: whether the default is the next number of a sequence, as such or made shorter. It is read
# as the server keeps it: nextval is function 1574, from bigint to integer leads 480, to smallint 714.
COUNTS = r"adbin::text ~ '^(\{FUNCEXPR :funcid (480|714) [^{]*:args \()?\{FUNCEXPR :funcid 1574 '"


def published_sql(version: int, publication: str) -> str:
    """A SELECT of the oids of the tables whose rows a publication sends under their own names.

    `publication` is the parameter with its name. Pure.
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
