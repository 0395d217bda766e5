"""`headwater demo`: the story, step by step. It ends by itself and leaves nothing behind."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.failure import OK, UNREACHABLE, Failure

if TYPE_CHECKING:
    from headwater.cli.demo.child import Child
    from headwater.cli.demo.page import Page
    from headwater.model.change import Transaction

PATIENCE_SECONDS = 10.0
THROUGH_THE_SERVER, FROM_OUTSIDE, WHILE_DOWN, AT_LEAST_BEFORE_KILL = 8, 4, 3, 25


def add(commands: Any) -> None:
    """Register `demo`."""
    parser = commands.add_parser("demo", help="see it work, in under twenty seconds")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from headwater.cli.demo.child import Child
    from headwater.cli.demo.page import Page

    with tempfile.TemporaryDirectory(prefix="headwater-demo-") as folder:
        data, page = Path(folder), Page()
        page.heading(1, "A server on an embedded database")
        child = Child(data)
        page.say(f"process {child.pid} answers at {child.url} after {child.seconds:.2f} s")
        story = Story(page, data, child)
        try:
            story.tell()
        finally:
            story.close()
    return OK


class Story:
    """What happens, in order. Commits and orders are counted when they are acknowledged."""

    def __init__(self, page: Page, data: Path, child: Child) -> None:
        from headwater.log.disk import DiskLog

        self._page, self._data, self._child = page, data, child
        self._log = DiskLog.open(data / "main.log.db", read_only=True)
        self._seen = 0
        self._commits = self._outside = self._orders = 0
        self._restart_seconds = 0.0

    def close(self) -> None:
        """Let everything go."""
        self._log.close()
        self._child.stop()

    def tell(self) -> None:
        """The whole story."""
        self._write_through_the_server()
        self._write_from_outside()
        self._roll_back()
        self._kill()
        self._prove()
        self._sum_up()

    # --- steps -----------------------------------------------------------------------------------------------

    def _write_through_the_server(self) -> None:
        from headwater.cli.demo import shop

        self._page.heading(2, "A small shop, written through the server: the log fills")
        shop.create(self._child.remote)
        self._commits += len(shop.TABLES) + 2
        for number in range(THROUGH_THE_SERVER):
            shop.order(self._child.remote, number)
        self._orders += THROUGH_THE_SERVER
        shop.ship(self._child.remote, 1)
        shop.ship(self._child.remote, 2)
        self._commits += THROUGH_THE_SERVER + 2
        self._show_new()

    def _write_from_outside(self) -> None:
        from headwater.cli.demo import shop

        self._page.heading(3, "Another program writes straight into the file, with plain sqlite3")
        pid = shop.write_from_outside(self._data / "main.db", 0, FROM_OUTSIDE)
        self._outside += FROM_OUTSIDE
        self._orders += FROM_OUTSIDE
        self._page.say(f"process {pid} made {FROM_OUTSIDE} commits, then deleted every order and rolled back:")
        self._show_new()

    def _roll_back(self) -> None:
        from headwater.cli.demo import shop

        self._page.heading(4, "A transaction that is rolled back leaves no trace")
        remote, before = self._child.remote, self._latest()
        tx = remote.call("tx.begin")["tx"]
        for number in range(3):
            shop.order(remote, number, tx=tx)
        remote.call("tx.rollback", tx=tx)
        self._page.say(f"three orders in transaction {tx}, then tx.rollback")
        self._check(self._latest() == before, f"the log still ends at offset {before}")

    def _kill(self) -> None:
        from headwater.cli.demo import shop
        from headwater.cli.demo.child import Child

        self._page.heading(5, "kill -9 while orders come in")
        enough, counted = threading.Event(), [0]
        writer = threading.Thread(target=self._order_until_killed, args=(enough, counted))
        writer.start()
        enough.wait(PATIENCE_SECONDS)
        pid = self._child.pid
        self._child.kill()
        writer.join()
        self._commits += counted[0]
        self._orders += counted[0] + WHILE_DOWN
        self._page.say(f"process {pid} is gone; {counted[0]} more orders had been acknowledged")
        shop.write_from_outside(self._data / "main.db", FROM_OUTSIDE, WHILE_DOWN)
        self._outside += WHILE_DOWN
        self._page.say(f"with no server at all, the other program makes {WHILE_DOWN} commits")
        self._child = Child(self._data)
        self._restart_seconds = self._child.seconds
        self._page.say(f"process {self._child.pid} takes over after {self._restart_seconds:.2f} s")
        self._show_new()

    def _order_until_killed(self, enough: threading.Event, counted: list[int]) -> None:
        """Order on a connection of its own; the one request that the kill cuts off is not counted."""
        from headwater.cli.demo import shop
        from headwater.cli.remote import Remote

        remote = Remote(self._child.url)
        try:
            while True:
                shop.order(remote, counted[0])
                counted[0] += 1
                if counted[0] >= AT_LEAST_BEFORE_KILL:
                    enough.set()
        except Failure as failure:
            if failure.exit_code != UNREACHABLE:
                raise
        finally:
            enough.set()
            remote.close()

    def _prove(self) -> None:
        self._page.heading(6, "Nothing is lost")
        parts = self._parts(0)
        offsets = [offset for part in parts for offset in range(part.first, part.upto + 1)]
        self._check(offsets == list(range(1, len(offsets) + 1)), f"offsets 1 to {len(offsets)} without a hole")
        folded = fold(parts)
        for table in sorted(folded):
            rows = self._rows(table)
            self._check(folded[table] == rows, f"{table}: the log folds to the {len(rows)} rows of the table")
        # At most one order more than was acknowledged: the one whose answer the kill cut off.
        here = len(folded["orders"])
        self._check(here - self._orders in (0, 1), f"all {self._orders} acknowledged orders of both programs are there")

    def _sum_up(self) -> None:
        parts = self._parts(0)
        changes = Counter((change.table.name, change.op.word) for part in parts for change in part.changes)
        ops = ("insert", "update", "delete", "schema_change")
        self._page.heading(7, "Summary")
        tables = sorted({table for table, _ in changes})
        self._page.table(("table", *ops), [(table, *(changes[table, op] for op in ops)) for table in tables])
        facts = [
            ("changes", sum(changes.values())),
            ("offsets", f"{self._log.horizon} to {self._log.latest}"),
            ("transactions in the log", len({part.id for part in parts})),
            ("commits through the server", self._commits),
            ("commits of the other program", self._outside),
            ("restart after kill -9", f"{self._restart_seconds:.2f} s"),
        ]
        self._page.table(("what", "how much"), facts)
        self._page.say("")
        self._page.say("Commits of another program that are taken in together share a transaction in the log.")
        self._page.say("Next: headwater serve app=app.db --wal, and docs/quickstart.md")

    # --- looking ---------------------------------------------------------------------------------------------

    def _show_new(self) -> None:
        latest = self._latest()
        self._page.changes(self._parts(self._seen, latest))
        self._seen = latest

    def _latest(self) -> int:
        """The newest offset once the log file holds everything that is committed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            found = self._child.remote.call("stats.snapshot")["databases"]["main"]
            if found.get("lag_changes") == 0 and self._log.latest >= found["latest"]:
                return self._log.latest
            time.sleep(0.02)
        raise Failure("the log did not catch up", hint="Is the disk very slow? Try again.")

    def _parts(self, after: int, upto: int | None = None) -> list[Transaction]:
        return list(self._log.scan(after=after, upto=upto))

    def _rows(self, table: str) -> dict[Any, Any]:
        from headwater.model.literal import from_lit

        data = self._child.remote.call("sql.exec", sql=f"SELECT * FROM {table}")["result"]["data"]
        rows = [tuple(from_lit(lit) for lit in row) for row in data["rows"]]
        return {row[:1]: row for row in rows}

    def _check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Failure(f"this does not hold: {text}", hint="Please report it: it is a defect of Headwater.")
        self._page.proof(text)


def fold(parts: list[Transaction]) -> dict[str, dict[Any, Any]]:
    """The rows that result from applying every change in order, by table and key."""
    from headwater.model.change import Op

    tables: dict[str, dict[Any, Any]] = {}
    for part in parts:
        for change in part.changes:
            rows = tables.setdefault(change.table.name, {})
            if change.op is Op.SCHEMA_CHANGE:
                continue
            if change.before is not None:
                del rows[change.table.key_of(change.before)]
            if change.after is not None:
                rows[change.table.key_of(change.after)] = change.after
    return tables
