"""doctor, source list and source attach on PostgreSQL: every finding has the SQL that fixes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from tests.cli.cli_process import run, run_json, served
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import wait_until

from headwater.sources.postgres.capture.slot.slot import Slot
from headwater.sources.postgres.setup.doctor import (
    MOST_WARNINGS,
    Finding,
    TableFit,
    slot_findings,
    table_findings,
    warnings,
)

ROLE = f"doctor_{os.getpid()}"
SCHEMA = (
    "CREATE TABLE t(k int PRIMARY KEY, n int)",
    "CREATE TABLE wide(k int PRIMARY KEY, v text)",
    "CREATE TABLE whole(k int PRIMARY KEY, v text)",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    'CREATE TABLE "bare one"(x int)',
    "CREATE UNLOGGED TABLE fleeting(k int PRIMARY KEY)",
    f"CREATE ROLE {ROLE} LOGIN",
)


class Base:
    """A separate database, as the command line names it."""

    def __init__(self, name: str) -> None:
        self.name, self.server = name, shared_server()
        with self.server.connect() as admin:
            admin.execute(f"CREATE DATABASE {name}")
        self.db = self.server.connect(name)
        for statement in SCHEMA:
            self.db.execute(statement)

    def url(self, role: str = "postgres") -> str:
        return f"{self.name}=postgresql://{role}:s3cret@/{self.name}?host={self.server.folder}"

    def doctor(self, folder: Path, role: str = "postgres", **env: str) -> tuple[int, dict[str, dict[str, str]], str]:
        """Return the exit code, the remedies by state and finding, and everything printed."""
        done = run("doctor", self.url(role), "--data", "data", "-o", "json", cwd=folder, env=env)
        found: dict[str, dict[str, str]] = {"ok": {}, "warn": {}, "fail": {}}
        for check in json.loads(done.stdout):
            if check["subject"] == self.name:
                found[check["state"]][check["finding"]] = check["remedy"]
        return done.returncode, found, done.stdout + done.stderr

    def traces(self) -> list[Any]:
        slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
        return self.db.execute(f"SELECT pubname::text FROM pg_publication UNION ALL {slots}").fetchall()

    def close(self) -> None:
        self.db.execute(f"DROP OWNED BY {ROLE}")
        self.db.execute(f"DROP ROLE {ROLE}")
        self.db.close()
        run("source", "detach", self.url())
        with self.server.connect() as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Iterator[Base]:
    made = Base(f"doctor_{os.getpid()}_{abs(hash(request.node.name)) % 10_000}")
    yield made
    made.close()


def test_doctor_reports_problems_of_each_table_and_changes_nothing(base: Base, tmp_path: Path) -> None:
    code, found, printed = base.doctor(tmp_path)
    assert (code, found["fail"]) == (0, {}) and "s3cret" not in printed
    (problem,) = [each for each in found["warn"] if each.startswith("bare one has neither")]
    assert "it is not captured" in problem
    assert found["warn"][problem] == 'ALTER TABLE "public"."bare one" REPLICA IDENTITY FULL;'
    remedies = set(found["warn"].values())
    assert remedies >= {
        'ALTER TABLE "public"."wide" REPLICA IDENTITY FULL;',
        'ALTER TABLE "public"."bare one" ADD PRIMARY KEY (…);',
        'ALTER TABLE "public"."fleeting" SET LOGGED;',
        "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf();",
    }
    assert not any('"t"' in remedy or '"whole"' in remedy for remedy in remedies)
    assert any("not captured yet" in finding for finding in found["ok"])
    assert "3 tables can be captured" in found["ok"]
    assert base.traces() == [] and not (tmp_path / "data").exists()


def test_remedies_of_doctor_fix_the_reported_problems(base: Base, tmp_path: Path) -> None:
    _, found, _ = base.doctor(tmp_path)
    for remedy in [*found["warn"].values(), *found["fail"].values()]:
        if "ALTER TABLE" in remedy and "…" not in remedy:
            base.db.execute(remedy.encode())
    code, found, _ = base.doctor(tmp_path)
    assert (code, found["fail"]) == (0, {})
    assert [finding for finding in found["warn"] if finding.startswith(("wide", "fleeting"))] == []


def test_doctor_reports_missing_rights_of_a_role(base: Base, tmp_path: Path) -> None:
    code, found, printed = base.doctor(tmp_path, ROLE)
    assert code == 1 and found["fail"].pop("the role may not replicate") == f'ALTER ROLE "{ROLE}" REPLICATION;'
    assert any(f'GRANT SELECT ON "public"."t" TO "{ROLE}";' in remedy for remedy in found["warn"].values())
    assert found["fail"] == {}
    assert any(problem.startswith("t belongs to a role") for problem in found["warn"])
    base.db.execute(f"ALTER ROLE {ROLE} REPLICATION")
    code, found, printed = base.doctor(tmp_path, ROLE)
    (remedy,) = found["fail"].values()
    assert code == 1 and f'CREATE PUBLICATION "headwater_{base.name}"' in remedy
    base.db.execute("ALTER TABLE t OWNER TO " + ROLE)
    code, found, printed = base.doctor(tmp_path, ROLE, HEADWATER_POSTGRES_TABLES="t")
    (remedy,) = found["fail"].values()
    assert code == 1 and "CREATE PUBLICATION" in remedy
    base.db.execute(f"GRANT CREATE ON DATABASE {base.name} TO {ROLE}")
    code, found, printed = base.doctor(tmp_path, ROLE, HEADWATER_POSTGRES_TABLES="t")
    assert (code, found["fail"]) == (0, {}) and "s3cret" not in printed


def test_doctor_and_list_report_each_state_of_a_database(base: Base, tmp_path: Path) -> None:
    attached = run_json("source", "attach", base.url(), "--data", "data", "--table", "t", cwd=tmp_path)
    assert attached == {"database": base.name, "slot": f"headwater_{base.name}", "tables": ["t"]}
    rows = {row["table"]: row for row in run_json("source", "list", base.url(), cwd=tmp_path)}
    assert {name: row["captured"] for name, row in rows.items()} == {
        "t": True,
        "wide": False,
        "whole": False,
        "bare one": False,
        "fleeting": False,
    }
    assert rows["t"]["key"] == ["k"] and "no primary key" in rows["bare one"]["note"]
    assert "yes" in run("source", "list", base.url(), cwd=tmp_path).stdout
    only = {"HEADWATER_POSTGRES_TABLES": "t"}
    _, found, _ = base.doctor(tmp_path, **only)
    assert any("which nobody reads" in finding for finding in found["warn"])
    base.db.execute("INSERT INTO t VALUES (1, 1)")
    with served(tmp_path, base.url(), env=only) as server:
        # Once it tells of the row, its stream has connected and its log has the row.
        done = run("tail", f"{base.name}.t", "--server", server.url, "--since", "earliest", "--limit", "1")
        assert done.returncode == 0, done
        _, found, _ = base.doctor(tmp_path, **only)
        assert any("(headwater)" in finding for finding in found["ok"])
        assert not any("nobody" in finding for finding in found["warn"])
    shown = run("log", "show", "--db", base.name, "--data", "data", "-o", "json", cwd=tmp_path)
    assert json.loads(shown.stdout.splitlines()[0])["after"] == {"k": 1, "n": 1}
    free = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND NOT active"
    wait_until(lambda: base.db.execute(free, [f"headwater_{base.name}"]).fetchone(), "PostgreSQL to end the stream")
    base.db.execute("SELECT pg_drop_replication_slot(%s)", [f"headwater_{base.name}"])
    _, found, _ = base.doctor(tmp_path, **only)
    assert any("slot is gone" in finding for finding in found["warn"])


def test_doctor_fails_where_all_tables_are_to_be_published(base: Base, tmp_path: Path) -> None:
    code, found, _ = base.doctor(tmp_path, HEADWATER_POSTGRES_PUBLISH_ALL="true")
    ((problem, remedy),) = found["fail"].items()
    assert code == 1 and problem.startswith("bare one ") and "refuses its updates and deletes" in problem
    assert remedy == 'ALTER TABLE "public"."bare one" REPLICA IDENTITY FULL;'


def test_table_without_a_key_is_skipped_by_serve_with_a_warning(base: Base, tmp_path: Path) -> None:
    with served(tmp_path, base.url()) as server:
        base.db.execute('UPDATE "bare one" SET x = 1')
        lines = [line for line in server.errors.read_text().splitlines() if "WARNING" in line]
        (told,) = [line for line in lines if "bare one" in line]
        assert "it is not captured" in told and 'ALTER TABLE "public"."bare one" REPLICA IDENTITY FULL;' in told


def test_serve_warns_of_tables_whose_updates_the_publication_blocks(base: Base, tmp_path: Path) -> None:
    with served(tmp_path, base.url(), env={"HEADWATER_POSTGRES_PUBLISH_ALL": "true"}) as server:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            base.db.execute('UPDATE "bare one" SET x = 1')
        lines = [line for line in server.errors.read_text().splitlines() if "WARNING" in line]
        (told,) = [line for line in lines if "bare one" in line]
        assert "refuses its updates" in told and 'ALTER TABLE "public"."bare one" REPLICA IDENTITY FULL;' in told
        assert len([line for line in lines if "max_slot_wal_keep_size" in line]) == 1 and len(lines) == 2


def test_detach_without_ownership_of_the_publication_reports_the_statement_to_drop_it(
    base: Base, tmp_path: Path
) -> None:
    run_json("source", "attach", base.url(), "--data", "data", "--table", "t", cwd=tmp_path)
    base.db.execute(f"ALTER ROLE {ROLE} REPLICATION")
    drop = f'DROP PUBLICATION "headwater_{base.name}";'
    for said in ("removed the slot of", "has no slot"):
        done = run("source", "detach", base.url(ROLE), cwd=tmp_path)
        assert done.returncode == 0 and said in done.stdout and "s3cret" not in done.stdout + done.stderr
        note, hint = done.stderr.splitlines()
        assert "slot is gone" in note and "publication is left" in note and hint.endswith(drop)
    assert base.traces() == [(f"headwater_{base.name}",)]
    base.db.execute(drop.encode())
    assert "was not attached" in run("source", "detach", base.url(ROLE), cwd=tmp_path).stdout


def test_unreachable_server_is_reported_as_a_failure_with_a_remedy(tmp_path: Path) -> None:
    done = run("doctor", "gone=postgresql://u:s3cret@127.0.0.1:1/d", "-o", "json", cwd=tmp_path)
    (check,) = [each for each in json.loads(done.stdout) if each["subject"] == "gone"]
    assert (done.returncode, check["state"]) == (1, "fail") and check["remedy"]
    assert "s3cret" not in done.stdout + done.stderr


SLOT = Slot("pgoutput", "d", 0, 600, 400, "reserved", False, 0, None)
TABLE = TableFit("s.x", "t", "d", True, True, True, True, False, ("k",))


@pytest.mark.parametrize(
    ("slot", "problem"),
    [
        ({}, None),
        ({"plugin": "wal2json"}, "wal2json"),
        ({"plugin": ""}, "physical"),
        ({"database": "e"}, "of the database 'e'"),
        ({"two_phase": True}, "prepared"),
        ({"wal_status": "lost"}, "lost"),
        ({"wal_status": "unreserved"}, "unreserved"),
    ],
)
def test_slot_findings_name_the_problem_and_a_remedy(slot: dict[str, Any], problem: str | None) -> None:
    found = slot_findings("name", msgspec.structs.replace(SLOT, **slot), "d")
    assert (found == []) if problem is None else problem in found[0].problem and ";" in found[0].remedy


@pytest.mark.parametrize(
    ("table", "remedies"),
    [
        ({}, []),
        ({"may_toast": True}, ['ALTER TABLE "s.x"."t" REPLICA IDENTITY FULL;']),
        ({"may_toast": True, "identity": "f", "has_identity": False}, []),
        ({"identity": "n", "has_identity": False}, ['ALTER TABLE "s.x"."t" REPLICA IDENTITY FULL;']),
        ({"identity": "i", "key": ()}, []),
        (
            {"identity": "f", "has_identity": False, "has_virtual": True},
            ['ALTER TABLE "s.x"."t" REPLICA IDENTITY DEFAULT;'],
        ),
        ({"identity": "d", "has_virtual": True}, []),
        ({"is_logged": False}, ['ALTER TABLE "s.x"."t" SET LOGGED;']),
    ],
)
def test_table_findings_have_the_expected_remedies(table: dict[str, Any], remedies: list[str]) -> None:
    found = table_findings(msgspec.structs.replace(TABLE, **table))
    assert [each.remedy for each in found] == remedies and not any(each.fatal for each in found)
    assert all(each.problem.startswith('"s.x".t ') for each in found)


def test_warnings_at_the_start_are_few() -> None:
    bare = msgspec.structs.replace(TABLE, has_identity=False, key=(), is_readable=False)
    found = [each for _ in range(MOST_WARNINGS) for each in table_findings(bare)]
    assert len(warnings(found)) == MOST_WARNINGS and all("REPLICA IDENTITY" in line for line in warnings(found))
    more = warnings([*found, Finding("p", "r"), *table_findings(bare), *table_findings(bare)])
    assert len(more) == MOST_WARNINGS + 1 and more[-1].startswith("and 2 more")
    assert warnings([]) == []
