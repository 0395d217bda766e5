"""The databases of the kit over HTTP: random schemas, queries on them, and the answers that a client holds of each."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import apsw
import pyarrow
from tests.soundness.grammar import Queries, Query
from tests.soundness.schemas import Step, World

from headwater.model.literal import to_lit

JSON = "application/json"


class Asked:
    """A query with its arguments on one database, and the answers that a client holds in each format."""

    def __init__(self, query: Query, prepared: dict[str, Any], other: str) -> None:
        self.query, self.id = query, prepared["query_id"]
        self.path = f"/api/v1/q/{self.id}"
        args = {name: to_lit(query.args.get(name)) for name in prepared["parameters"]}  # ?9 makes nine of them
        self.args = {"args": json.dumps(args)}
        self.held: dict[str, dict[str, bytes]] = {JSON: {}, other: {}}  # tag to body, the oldest first
        self.explained: dict[str, Any] | None = None

    def any_format(self, dice: random.Random) -> str:
        """Return a random format, mostly JSON, which is compared with the file."""
        return dice.choice([JSON, JSON, *self.held])


class Captured:
    """One database: its file, our own connection to it (the second process), and its world."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.path = name, folder / f"{name}.db"
        self.asked = list[Asked]()
        self.world, self.grammar = self.made(seed)
        self.backup: Path | None = None
        self.open()
        with self.db:
            self.attempt(*self.world.setup)

    def made(self, seed: int) -> tuple[Any, Any]:
        """Return the world and the generator of its queries."""
        world = World(seed)
        grammar = Queries(world)
        if world.chance(0.6):
            world.add_view(*grammar.view())
        return world, grammar

    def open(self) -> None:
        self.db = apsw.Connection(str(self.path))
        self.db.set_busy_timeout(10_000)
        self.db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF")

    def attempt(self, *statements: str) -> None:
        """Run statements; failing ones leave nothing behind."""
        for sql in statements:
            with contextlib.suppress(apsw.Error):
                self.db.execute(sql)

    def write(self, step: Step) -> None:
        """Write in this process: in one transaction, or each statement by itself."""
        if "VACUUM" in step.statements or self.world.chance(0.4):
            self.attempt(*step.statements)
        else:
            with self.db:
                self.attempt(*step.statements)

    def keep(self) -> None:
        """Copy the file."""
        self.backup = self.path.with_suffix(".kept")
        self.backup.unlink(missing_ok=True)
        copy = apsw.Connection(str(self.backup))
        with copy.backup("main", self.db, "main") as all_of_it:
            all_of_it.step()
        copy.close()

    def restore(self) -> None:
        """Replace the file by its copy; no process may have it open."""
        if self.backup is None:
            return
        self.db.close()
        for end in ("-wal", "-shm"):
            Path(f"{self.path}{end}").unlink(missing_ok=True)
        shutil.copy(self.backup, self.path)
        self.open()

    def rows(self, sql: str, args: list[Any]) -> list[Any] | None:
        """Return the rows of a query on the file; None if SQLite refuses it."""
        try:
            return self.db.execute(sql, args).fetchall()
        except apsw.Error:
            return None

    def schema_step(self) -> Step:
        """Return a schema change; sometimes a table is created again as it was at first."""
        for asked in self.asked:
            asked.explained = None
        for step in self.world.plan_steps():
            return step
        if self.world.chance(0.75):
            return self.world._schema_step()
        table = self.world.pick(self.world.tables)
        rows = [sql for sql in self.world.rows if f" {table.name}(" in sql]
        return Step([f"DROP TABLE {table.name}", table.sql, *rows[:3]])


# --- tags and bodies ------------------------------------------------------------------------------------------


def opaque_of(tag: str) -> str:
    """Return the text between the quotes of a tag, without the marks of proxies."""
    return tag.removeprefix("W/").strip('"').removesuffix("-gzip")


def data_of(body: bytes, accept: str) -> bytes:
    """Return the answer without its tag, which may differ for equal rows."""
    return body.partition(b',"data":')[2] if accept.endswith("json") else body


def rows_of(body: bytes, accept: str) -> list[Any]:
    """Return the rows of an answer, sorted."""
    if accept.endswith("json"):
        return sorted(json.dumps(row) for row in json.loads(body)["data"]["rows"])
    if accept == "text/csv":
        return sorted(body.splitlines())
    return sorted(map(repr, pyarrow.ipc.open_stream(io.BytesIO(body)).read_all().to_pylist()))
