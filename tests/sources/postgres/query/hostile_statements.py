"""Statements of an attacker who may send SQL: seeded, of every kind that must be refused."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

# {file}: where no file may appear; {role}: a role that must not appear; {sender}, {other}: processes that must stay.
STATEMENTS = (
    "COPY orders TO '{file}'",
    "COPY (SELECT 1) TO '{file}'",
    "COPY orders TO PROGRAM 'touch {file}'",
    "COPY orders (note) FROM '/etc/passwd'",
    "CREATE ROLE {role} SUPERUSER",
    "CREATE USER {role} LOGIN PASSWORD 'x'",
    "ALTER ROLE CURRENT_USER SUPERUSER",
    "ALTER ROLE CURRENT_USER CREATEROLE",
    "GRANT pg_read_server_files TO CURRENT_USER",
    "GRANT pg_monitor TO PUBLIC",
    "CREATE TABLE canary_table (x int)",
    "CREATE TABLE canary_copy AS SELECT * FROM secret",
    "CREATE VIEW canary_view AS SELECT * FROM secret",
    "CREATE SCHEMA canary_schema",
    "CREATE SEQUENCE canary_sequence",
    "CREATE TYPE canary_type AS (x int)",
    "CREATE FUNCTION canary_function() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'",
    "CREATE OR REPLACE FUNCTION canary_plpgsql() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN 1; END'",
    "CREATE PROCEDURE canary_procedure() LANGUAGE sql AS 'SELECT 1'",
    "CREATE TRIGGER canary_trigger BEFORE INSERT ON orders EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "CREATE RULE canary_rule AS ON SELECT TO orders DO INSTEAD SELECT * FROM secret",
    "CREATE EXTENSION file_fdw",
    "CREATE EXTENSION dblink",
    "CREATE EVENT TRIGGER canary_event ON ddl_command_end EXECUTE FUNCTION pg_catalog.pg_event_trigger_ddl_commands()",
    "CREATE SERVER canary_server FOREIGN DATA WRAPPER file_fdw",
    "CREATE PUBLICATION canary_publication FOR TABLE orders",
    "CREATE DATABASE canary_database",
    "CREATE INDEX canary_index ON orders (note)",
    "DROP TABLE orders",
    "DROP TABLE secret CASCADE",
    "TRUNCATE secret",
    "TRUNCATE orders",
    "ALTER TABLE orders ADD COLUMN canary int",
    "ALTER TABLE orders DISABLE TRIGGER ALL",
    "ALTER TABLE orders OWNER TO CURRENT_USER",
    "ALTER SYSTEM SET work_mem = '1GB'",
    "ALTER DATABASE CURRENT_CATALOG SET work_mem = '1GB'",
    "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC",
    "GRANT ALL ON secret TO PUBLIC",
    "REVOKE ALL ON orders FROM PUBLIC",
    "SET ROLE postgres",
    "SET SESSION AUTHORIZATION postgres",
    "SET LOCAL session_replication_role = replica",
    "RESET SESSION AUTHORIZATION",
    "SELECT * FROM secret",
    "TABLE secret",
    "SELECT word FROM secret LIMIT 1",
    "SELECT rolpassword FROM pg_authid",
    "SELECT passwd FROM pg_shadow",
    "SELECT * FROM pg_hba_file_rules",
    "INSERT INTO secret VALUES (99, 'canary')",
    "UPDATE secret SET word = 'canary'",
    "DELETE FROM secret",
    "DELETE FROM pg_proc",
    "UPDATE pg_authid SET rolsuper = true",
    "UPDATE pg_class SET relname = 'canary' WHERE relname = 'orders'",
    "MERGE INTO secret USING orders ON secret.id = orders.id WHEN MATCHED THEN DELETE",
    "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE",
    "NOTIFY canary",
    "LISTEN canary",
    "VACUUM FULL orders",
    "CLUSTER orders USING orders_pkey",
    "REINDEX TABLE orders",
    "CHECKPOINT",
    "LOAD 'auto_explain'",
    "PREPARE canary AS SELECT * FROM secret",
    "DECLARE canary CURSOR WITH HOLD FOR SELECT * FROM secret",
    "IMPORT FOREIGN SCHEMA public FROM SERVER canary_server INTO public",
    "SECURITY LABEL ON TABLE orders IS 'canary'",
    "COMMENT ON TABLE orders IS 'canary'",
    "REASSIGN OWNED BY postgres TO CURRENT_USER",
    "DISCARD ALL",
    "CALL canary_procedure()",
    "COMMIT",
    "ROLLBACK AND CHAIN",
)
CALLS = (
    "pg_read_file('/etc/passwd')",
    "pg_read_binary_file('/etc/passwd')",
    "pg_ls_dir('.')",
    "pg_ls_waldir()",
    "pg_stat_file('postgresql.conf')",
    "lo_import('/etc/passwd')",
    "lo_from_bytea(0, 'canary')",
    "lo_create(0)",
    "lo_export(1, '{file}')",
    "lo_unlink(1)",
    "pg_terminate_backend({sender})",
    "pg_terminate_backend({other})",
    "pg_cancel_backend({other})",
    "pg_catalog.pg_terminate_backend({other}, 0)",
    "pg_reload_conf()",
    "pg_rotate_logfile()",
    "pg_switch_wal()",
    "pg_create_restore_point('canary')",
    "pg_promote()",
    "pg_create_logical_replication_slot('canary_slot', 'pgoutput')",
    "pg_create_physical_replication_slot('canary_slot')",
    "pg_drop_replication_slot('{slot}')",
    "pg_replication_slot_advance('{slot}', pg_current_wal_lsn())",
    "pg_logical_slot_get_changes('{slot}', NULL, NULL)",
    "pg_logical_emit_message(true, 'headwater', 'canary')",
    "pg_replication_origin_create('canary')",
    "set_config('role', 'postgres', false)",
    "set_config('session_authorization', 'postgres', false)",
    "query_to_xml('SELECT * FROM secret', true, true, '')",
    "table_to_xml('secret', true, true, '')",
    "database_to_xml(true, true, '')",
    "cursor_to_xml('canary', 1, true, true, '')",
    "pg_export_snapshot()",
    "pg_advisory_lock(1)",
    "setval(pg_get_serial_sequence('orders', 'id'), 1)",
    "nextval('canary_sequence')",
    "current_setting('data_directory')",
    "pg_backup_start('canary')",
    "pg_wal_replay_pause()",
    "pg_stat_reset()",
    "pg_import_system_collations('public')",
    "pg_extension_config_dump('orders', '')",
    "canary_function()",
    "dblink('dbname=postgres', 'SELECT 1')",
    "has_table_privilege('secret', 'SELECT')",
    "(SELECT string_agg(word, ',') FROM secret)",
    "(SELECT count(*) FROM pg_authid WHERE rolpassword IS NOT NULL)",
)
AROUND_STATEMENTS = (
    "{s}",
    "/* {n} */ {s}",
    "-- {n}\n{s}",
    "{s};",
    "SELECT 1; {s}",
    "EXPLAIN {s}",
    "EXPLAIN (ANALYZE) {s}",
    "WITH x AS ({s}) SELECT 1",
    "DO $$BEGIN {s}; END$$",
    "DO LANGUAGE plpgsql $x$BEGIN EXECUTE '{q}'; END$x$",
    "({s})",
    "BEGIN; {s}; COMMIT",
)
AROUND_CALLS = (
    "SELECT {c}",
    "SELECT {c} FROM orders LIMIT 1",
    "SELECT * FROM {c}",
    "SELECT * FROM {c} AS x",
    "VALUES ({c})",
    "SELECT CASE WHEN true THEN ({c})::text END",
    "SELECT (SELECT ({c})::text)",
    "SELECT count(*) FROM orders WHERE ({c}) IS NOT NULL",
    "SELECT id FROM orders ORDER BY ({c})::text LIMIT 1",
    "SELECT max(({c})::text) OVER () FROM orders",
    "WITH x AS MATERIALIZED (SELECT ({c})::text) SELECT * FROM x",
    "SELECT x FROM orders, LATERAL (SELECT ({c})::text AS x) y",
    "SELECT coalesce(NULL, ({c})::text)",
    "INSERT INTO orders SELECT 1000 + {n}, 1, ({c})::text",
    "UPDATE orders SET note = ({c})::text WHERE id = 1",
    "DELETE FROM orders WHERE id = 2000 AND ({c}) IS NULL RETURNING ({c})::text",
    "INSERT INTO orders VALUES (3000 + {n}, 1, '') RETURNING ({c})::text",
    "EXPLAIN ANALYZE SELECT {c}",
    "DO $$BEGIN PERFORM {c}; END$$",
)
AROUND_FILTERS = ("({c}) IS NOT NULL", "id = 1 OR ({c})::text = 'x'", "id IN (SELECT length(({c})::text))")


class Attack(msgspec.Struct, frozen=True):
    """One text, and whether it is a filter and not a statement."""

    text: str
    is_filter: bool = False


def attacks(seed: str, count: int, **names: object) -> Iterator[Attack]:
    """Yield `count` texts, with `names` in place of the braces; every statement and call is among the first."""
    dice = random.Random(seed)
    todo: list[tuple[str, str]] = [("s", text) for text in STATEMENTS] + [("c", text) for text in CALLS]
    dice.shuffle(todo)
    for number in range(count):
        kind, text = todo[number] if number < len(todo) else dice.choice(todo)
        for name, value in names.items():
            text = text.replace("{" + name + "}", str(value))
        is_filter = kind == "c" and dice.random() < 0.15
        around = AROUND_FILTERS if is_filter else AROUND_CALLS if kind == "c" else AROUND_STATEMENTS
        filled = dice.choice(around).replace("{q}", text.replace("'", "''"))
        filled = filled.replace("{s}", text).replace("{c}", text).replace("{n}", str(number))
        yield Attack(_disguised(filled, dice), is_filter)


def _disguised(text: str, dice: random.Random) -> str:
    """Return a different spelling that PostgreSQL treats as the same."""
    choice = dice.randrange(6)
    if choice == 0:
        return text.upper() if "'" not in text and '"' not in text else text
    if choice == 1:
        return (
            text.replace("pg_catalog.", "").replace("pg_", "pg_catalog.pg_", 1)
            if text.startswith("SELECT pg_")
            else text
        )
    if choice == 2:
        return text.replace(" ", "\n\t", 3)
    if choice == 3:
        return text.replace(" ", " /**/ ", 2)
    return text
