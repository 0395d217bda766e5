"""DDL statements as they were run: the event trigger, and forged messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import run
from tests.sources.postgres.pg_source import PgRig

from headwater.feeds.snapshot import _ALTER
from headwater.model.change import Op
from headwater.ranges.pull.table_changes import stop_of
from headwater.sources.postgres.schema.ddl_trigger import INSTALL, IS_INSTALLED, MOST_CHARACTERS, PREFIX, Statement
from headwater.sources.postgres.schema.shape_changes import is_end
from headwater.sources.postgres.setup.detach import detach

TABLE = "CREATE TABLE t (k int PRIMARY KEY, v text)"

NO_MESSAGES = """
DO $$
DECLARE each regprocedure;
BEGIN
  FOR each IN SELECT oid FROM pg_proc WHERE proname = 'pg_logical_emit_message' LOOP
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', each);
  END LOOP;
END $$
"""


def shown(own: PgRig) -> list[str]:
    """Return the texts of all schema changes that are new."""
    return [change.ddl or "" for part in own.pull() for change in part.changes if change.op is Op.SCHEMA_CHANGE]


def emit(own: PgRig, content: str, *, prefix: str = PREFIX) -> None:
    own.db.execute("SELECT pg_logical_emit_message(true, %s, %s)", [prefix, content])


def forge(own: PgRig, text: str, table: str = "t") -> None:
    emit(own, json.dumps({"schema": "public", "table": table, "text": text}))


def test_statement_is_shown_in_its_own_transaction(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL, "INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.run("ALTER TABLE t\n  ADD w int DEFAULT 5", "INSERT INTO t VALUES (2, 'b', 6)")
    told, row = own.pull()[-2:]
    (comment,) = told.changes
    assert comment.ddl == "-- ALTER TABLE t ADD w int DEFAULT 5"
    assert comment.table.names == ("k", "v") and not comment.resnapshot
    assert [change.ddl for change in row.changes[:-1]] == ['ALTER TABLE t ADD COLUMN "w" integer']
    assert row.changes[0].resnapshot  # as without the trigger


def test_dropped_table_is_reported_with_its_statement(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE SCHEMA s", TABLE, "CREATE TABLE s.u (k int PRIMARY KEY)", INSTALL)
    own.run("INSERT INTO t VALUES (1, 'a')", "INSERT INTO s.u VALUES (1)")
    own.pull()
    own.run("DROP SCHEMA s CASCADE")
    assert shown(own) == ["-- DROP SCHEMA s CASCADE"]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE INDEX i ON t (v)",
        "CREATE TEMP TABLE t2 (k int)",
        "CREATE VIEW w AS SELECT 1",
        "CREATE TABLE fresh (k int PRIMARY KEY)",
        "CREATE ROLE x PASSWORD 'secret'; DROP ROLE x",
    ],
)
def test_statement_that_alters_no_known_table_is_not_shown(rig: Callable[..., PgRig], statement: str) -> None:
    own = rig(TABLE, INSTALL, "INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.run(statement, "INSERT INTO t VALUES (2, 'b')")
    assert not [text for text in shown(own) if text.startswith("-- ")]


def test_ddl_of_a_schema_change_is_the_same_after_a_crash(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL, "INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.acknowledge()
    kept = len(own.log)
    own.run("ALTER TABLE t ADD w int", "ALTER TABLE t ADD x int", "INSERT INTO t VALUES (2, 'b', 6, 7)")
    before = own.pull()
    del own.log[kept:]
    own.open()
    assert own.pull() == before
    assert [change.ddl for part in before[:2] for change in part.changes] == [
        "-- ALTER TABLE t ADD w int",
        "-- ALTER TABLE t ADD x int",
    ]


def test_ddl_statement_inside_a_large_transaction_is_logged_between_its_changes(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL, "INSERT INTO t VALUES (0, 'a')", user="postgres")
    own.pull()
    own.run("SET logical_decoding_work_mem = '64kB'")
    own.run("BEGIN", "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 2000) i")
    own.run("ALTER TABLE t ADD w int", "INSERT INTO t VALUES (3000, 'b', 1)", "COMMIT")
    changes = [change for part in own.pull() for change in part.changes]
    (place,) = [place for place, change in enumerate(changes) if (change.ddl or "").startswith("-- ")]
    assert sum(change.op is Op.INSERT for change in changes[:place]) == 2000, changes[place - 1]
    assert changes[-1].after == (3000, "b", 1)


@pytest.mark.parametrize("text", ["x\nDROP TABLE t", "x */ ALTER TABLE t RENAME TO u", "a\x1b[2Jb\r\u2028c", ""])
def test_forged_statement_is_a_comment(rig: Callable[..., PgRig], text: str) -> None:
    own = rig(TABLE)
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    forge(own, text)
    (change,) = [change for part in own.pull() for change in part.changes]
    assert change.ddl is not None and change.ddl.startswith("-- ") and change.ddl.isprintable()
    assert not is_end(change) and not stop_of(change) and _ALTER.match(change.ddl)
    own.run("INSERT INTO t VALUES (2, 'b')")
    own.pull()
    assert own.fold() == own.rows()


def test_message_that_is_not_the_triggers_is_ignored(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (1, 'a')")
    own.pull()
    for content in ("", "{", "[]", '{"schema": 1}', '{"schema": "public", "table": "t"}', "\\xff"):
        emit(own, content)
    forge(own, "DROP TABLE nowhere", table="nowhere")
    own.db.execute("SELECT pg_logical_emit_message(false, %s, 'x')", [PREFIX])
    assert own.pull() == []


def test_long_statement_is_cut(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL, "INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.run(f"ALTER TABLE t ADD w int -- {'x' * 5000}")
    (text,) = shown(own)
    assert len(text) == len("-- ") + MOST_CHARACTERS
    assert len(Statement("public", "t", "y" * 5000).comment) == len("-- ") + MOST_CHARACTERS


def test_role_that_may_not_write_messages_can_alter_its_tables(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL, NO_MESSAGES)
    role = f"weak_{own.name}"
    own.run(f"CREATE ROLE {role}", f"ALTER TABLE t OWNER TO {role}", f"GRANT CREATE ON SCHEMA public TO {role}")
    own.run(f"SET ROLE {role}", "ALTER TABLE t ADD w int", "RESET ROLE")
    own.run("INSERT INTO t VALUES (1, 'a', 2)", f"ALTER TABLE t OWNER TO {own.user}", f"DROP OWNED BY {role}")
    own.run(f"DROP ROLE {role}")
    own.pull()
    assert own.fold() == own.rows()


def test_detach_removes_the_trigger(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL)
    own.kill()
    gone = detach(own.name, own.url, config=own.config)
    assert gone.changed and not gone.left_trigger
    assert own.db.execute(IS_INSTALLED).fetchone() is None
    own.run("ALTER TABLE t ADD w int")


def test_detach_by_another_role_tells_how_to_remove_the_trigger(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, INSTALL)
    own.kill()
    role = f"weak_{own.name}"
    own.run(f"CREATE ROLE {role} LOGIN REPLICATION")
    url = own.url.replace(f"{own.user}@", f"{role}@")
    gone = detach(own.name, url, config=own.config)
    assert "DROP EVENT TRIGGER" in gone.left_trigger and own.db.execute(IS_INSTALLED).fetchone()
    own.run(*gone.left_trigger.split("\n"), f"DROP ROLE {role}")
    assert own.db.execute(IS_INSTALLED).fetchone() is None


def test_setup_prints_the_ddl_trigger_only_with_the_flag_ddl_statements(
    rig: Callable[..., PgRig], tmp_path: Path
) -> None:
    own = rig(TABLE)
    plain: Any = run("source", "setup", f"shop={own.url}", "--data", tmp_path)
    asked: Any = run("source", "setup", f"shop={own.url}", "--data", tmp_path, "--ddl-statements")
    assert INSTALL not in plain.stdout and INSTALL in asked.stdout
