"""DDL statements as they were run: an optional event trigger, installed by an operator, writes them into the WAL.

Any role that can connect to the database can write such a message. So its text is shown as a comment and never
interpreted: shapes and the ends of tables are taken only from the stream and the catalogue.
"""

from __future__ import annotations

import msgspec

PREFIX = "headwater.ddl"  # prefix of the trigger's logical messages
MOST_CHARACTERS = 2_000  # of one statement

# An error inside the function would abort the statement of another program: the function runs with the rights of its
# owner, so that nothing in it is refused. An exception handler is no alternative: the server sends messages written
# inside a handler after the rows that follow them.
INSTALL = f"""\
CREATE OR REPLACE FUNCTION public._headwater_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $headwater$
DECLARE
  found record;
BEGIN
  IF TG_EVENT = 'sql_drop' THEN
    FOR found IN SELECT schema_name AS schema, object_name AS name FROM pg_event_trigger_dropped_objects()
      WHERE object_type = 'table' AND NOT is_temporary
    LOOP
      PERFORM pg_logical_emit_message(true, '{PREFIX}', json_build_object(
        'schema', found.schema, 'table', found.name, 'text', left(current_query(), {MOST_CHARACTERS}))::text);
    END LOOP;
  ELSE
    FOR found IN SELECT DISTINCT n.nspname AS schema, c.relname AS name FROM pg_event_trigger_ddl_commands() d
      JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
      JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT d.in_extension
    LOOP
      PERFORM pg_logical_emit_message(true, '{PREFIX}', json_build_object(
        'schema', found.schema, 'table', found.name, 'text', left(current_query(), {MOST_CHARACTERS}))::text);
    END LOOP;
  END IF;
END
$headwater$;
CREATE EVENT TRIGGER headwater_ddl ON ddl_command_end EXECUTE FUNCTION public._headwater_ddl();
CREATE EVENT TRIGGER headwater_drop ON sql_drop EXECUTE FUNCTION public._headwater_ddl();"""

REMOVE = """\
DROP EVENT TRIGGER IF EXISTS headwater_ddl;
DROP EVENT TRIGGER IF EXISTS headwater_drop;
DROP FUNCTION IF EXISTS public._headwater_ddl();"""

IS_INSTALLED = "SELECT 1 FROM pg_proc WHERE proname = '_headwater_ddl' AND pronamespace = 'public'::regnamespace"


class Statement(msgspec.Struct, frozen=True):
    """A message of the trigger: a statement, and a table that it created, altered or dropped."""

    schema: str
    table: str
    text: str

    @property
    def comment(self) -> str:
        """Return the text as an SQL comment of one line."""
        printable = "".join(each if each.isprintable() else " " for each in self.text[:MOST_CHARACTERS])
        return f"-- {' '.join(printable.split())}"
