"""`headwater demo`: a demonstration, step by step. It ends by itself and leaves nothing behind."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from headwater.cli.demo import shop
from headwater.cli.failure import OK, UNREACHABLE, Failure
from headwater.cli.filters import FeedTarget
from headwater.model.quantity import counted

if TYPE_CHECKING:
    from headwater.cli.demo.database import DemoDatabases
    from headwater.cli.demo.follower import Follower, ReceivedChange
    from headwater.cli.demo.output import Page
    from headwater.cli.demo.server_process import ServerProcess
    from headwater.model.change import Transaction

PATIENCE_SECONDS = 10.0
THROUGH_THE_SERVER, WHILE_AWAY, FROM_OUTSIDE, WHILE_DOWN, AT_LEAST_BEFORE_KILL = 8, 3, 4, 3, 25
LARGE = "quantity >= 3"


def add(commands: Any) -> None:
    """Register `demo`."""
    parser = commands.add_parser("demo", help="see it work, in about a minute", allow_abbrev=False)
    parser.add_argument(
        "--source", choices=("sqlite", "postgres"), default="sqlite", help="the database it plays on (sqlite)"
    )
    parser.add_argument(
        "--url", metavar="URL", help="a PostgreSQL superuser's, in place of a server that is started and removed"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from headwater.cli.demo.database import demo_databases

    with (
        tempfile.TemporaryDirectory(prefix="headwater-demo-") as folder,
        closing(demo_databases(args.source, args.url, Path(folder))) as ground,
    ):
        _play(Path(folder), ground)
    return OK


def _play(data: Path, ground: DemoDatabases) -> None:
    from headwater.cli.demo.output import Page
    from headwater.cli.demo.server_process import ServerProcess

    page = Page()
    page.heading(1, ground.title)
    child = ServerProcess(data, ground.databases, ground.settings)
    page.say(f"process {child.pid} answers at {child.url} after {child.seconds:.2f} s")
    try:
        story = DemoSteps(page, data, child, ground)
    except BaseException:
        child.stop()
        raise
    with closing(story):
        story.run()


class DemoSteps:
    """The steps, in order. Commits and orders are counted when they are acknowledged."""

    def __init__(self, page: Page, data: Path, child: ServerProcess, ground: DemoDatabases) -> None:
        from headwater.log.disk.disk_log import DiskLog

        self._page, self._data, self._child, self._ground = page, data, child, ground
        self._log = DiskLog.open(data / "main.log.db", read_only=True)
        self._commits = self._outside = self._orders = 0
        self._restart_seconds = 0.0
        self._connections = 0
        self._arrived: list[ReceivedChange] = []  # over the feed of the whole database, in the order of arrival
        self._lake: list[tuple[str, str]] = []  # rows by table
        self._late: list[float] = []  # milliseconds, of changes that a reader waited for
        self._feed = self._connect()

    def close(self) -> None:
        """Close the feed and the log, and stop the server."""
        self._feed.close()
        self._log.close()
        self._child.stop()

    def run(self) -> None:
        """Run all steps."""
        self._write_through_the_server()
        self._filter()
        self._resume()
        self._write_from_outside()
        self._roll_back()
        self._kill()
        self._prove()
        self._carry()
        self._sum_up()

    # --- steps -----------------------------------------------------------------------------------------------

    def _write_through_the_server(self) -> None:
        self._page.heading(2, "A small shop, written through the server: a live feed shows every change")
        shop.create(self._child.remote)
        self._commits += len(shop.TABLES) + 2
        for number in range(THROUGH_THE_SERVER):
            shop.order(self._child.remote, number)
        self._orders += THROUGH_THE_SERVER
        shop.ship(self._child.remote, 1)
        shop.ship(self._child.remote, 2)
        self._commits += THROUGH_THE_SERVER + 2
        new = self._show_new(live=True)
        self._late = [arrival.late_ms for arrival in new]
        self._page.say("(+ how long after its commit a change was here)")

    def _filter(self) -> None:
        """Change quantities, which were 1 2 3 4: order 1 becomes large, order 3 small, and order 4 stays large."""
        from headwater.cli.demo.follower import Follower

        self._page.heading(3, f"A second feed, only of rows where {LARGE}")
        with closing(Follower(self._child.url, FeedTarget("main", "orders"), where=LARGE)) as large:
            for order, quantity in ((2, 1), (4, 5), (3, 2), (1, 9)):
                shop.reorder(self._child.remote, order, quantity)
            self._commits += 4
            latest = self._latest()
            new = large.take(latest)
        self._page.arrivals(new, live=True)
        received = [(arrival.found["op"], arrival.found["pk"]) for arrival in new]
        self._check(received == [("update", [4]), ("delete", [3]), ("insert", [1])], "order 4 was large and is: update")
        self._page.proof(
            "order 3 is large no more: delete; order 1 has become large: insert; order 2 never was: nothing"
        )
        self._arrived += self._feed.take(latest)

    def _resume(self) -> None:
        self._page.heading(4, "The feed hangs up, orders come in, it goes on from the last id it saw")
        self._feed.close()
        self._arrived += self._feed.take()
        last = self._arrived[-1].offset
        for number in range(WHILE_AWAY):
            shop.order(self._child.remote, number)
        self._orders += WHILE_AWAY
        self._commits += WHILE_AWAY
        self._feed = self._connect()
        new = self._show_new()
        received = [arrival.offset for arrival in new]
        self._check(received == list(range(last + 1, last + WHILE_AWAY + 1)), f"it was at {last}; no gap, no repeat")

    def _write_from_outside(self) -> None:
        self._page.heading(5, self._ground.outside)
        pid = self._ground.order(0, FROM_OUTSIDE)
        self._outside += FROM_OUTSIDE
        self._orders += FROM_OUTSIDE
        self._page.say(f"process {pid} made {FROM_OUTSIDE} commits, then deleted every order and rolled back:")
        self._show_new()

    def _roll_back(self) -> None:
        self._page.heading(6, "A transaction that is rolled back leaves no trace")
        remote, before = self._child.remote, self._latest()
        tx = remote.call("tx.begin")["tx"]
        for number in range(3):
            shop.order(remote, number, tx=tx)
        remote.call("tx.rollback", tx=tx)
        self._page.say(f"three orders in transaction {tx}, then tx.rollback")
        self._check(self._latest() == before, f"the log still ends at offset {before}")

    def _kill(self) -> None:
        from headwater.cli.demo.server_process import ServerProcess

        self._page.heading(7, "kill -9 while orders come in")
        enough, counted = threading.Event(), [0]
        writer = threading.Thread(target=self._order_until_killed, args=(enough, counted))
        writer.start()
        enough.wait(PATIENCE_SECONDS)
        pid = self._child.pid
        self._child.kill()
        writer.join()
        self._feed.close()
        self._arrived += self._feed.take()
        self._commits += counted[0]
        self._orders += counted[0] + WHILE_DOWN
        self._page.say(f"process {pid} is gone; {counted[0]} more orders had been acknowledged")
        self._ground.order(FROM_OUTSIDE, WHILE_DOWN)
        self._outside += WHILE_DOWN
        self._page.say(f"with no server at all, the other program makes {WHILE_DOWN} commits")
        self._child = ServerProcess(self._data, self._ground.databases, self._ground.settings)
        self._restart_seconds = self._child.seconds
        self._page.say(f"process {self._child.pid} takes over after {self._restart_seconds:.2f} s")
        last = self._arrived[-1].offset
        self._feed = self._connect()
        self._page.say(f"the feed was at offset {last}, and goes on from there:")
        self._show_new()

    def _order_until_killed(self, enough: threading.Event, counted: list[int]) -> None:
        """Order on another connection; the request that the kill interrupts is not counted."""
        from headwater.cli.remote import Remote

        try:
            with closing(Remote(self._child.url)) as remote:
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

    def _prove(self) -> None:
        self._page.heading(8, "Nothing is lost")
        parts = list(self._log.scan(after=0))
        offsets = [offset for part in parts for offset in range(part.first, part.upto + 1)]
        self._check(offsets == list(range(1, len(offsets) + 1)), f"offsets 1 to {len(offsets)} without a hole")
        brought = [fields_of(arrival.found) for arrival in self._arrived]
        self._check(
            brought == [fields_of(each) for each in wire(parts)],
            f"the feed brought these {len(brought)} changes, in order, each once, over {self._connections} connections",
        )
        folded = apply_changes(parts)
        for table in sorted(folded):
            rows = self._rows(table)
            self._check(folded[table] == rows, f"{table}: the log folds to the {len(rows)} rows of the table")
        # At most one order more than was acknowledged: the kill may interrupt the answer to a committed one.
        here = len(folded["orders"])
        self._check(here - self._orders in (0, 1), f"all {self._orders} acknowledged orders of both programs are there")

    def _carry(self) -> None:
        from headwater.cli.demo.lake import SPEC, TABLES, VISITS, Lake

        self._page.heading(9, "The Spark pipeline: all rows, then every change, into a Delta lake")
        self._ground.open_web(self._child.remote)
        self._ground.visit(VISITS)
        self._page.say(f"a second database with {VISITS:,} visits; the pipeline is this file:")
        for line in SPEC.format(url=self._child.url).splitlines():
            self._page.say(f"    {line}")
        with closing(Lake(self._data, self._child.url)) as lake:
            self._page.say(f"Spark is up after {lake.seconds:.1f} s")
            with lake.running():
                lake.wait(self._latest(), self._web())
                for number in range(FROM_OUTSIDE):
                    shop.order(self._child.remote, number)
                self._orders += FROM_OUTSIDE
                self._commits += FROM_OUTSIDE
                self._ground.visit(0)
                lake.wait(self._latest(), self._web())
            self._arrived += self._feed.take(self._latest())
            self._page.heading(10, "The lake equals the database: range by range, at the lake's own offset")
            for report in lake.verify():
                where = f"{counted(len(report.ranges), 'range')} equal at offset {report.offset}"
                self._check(report.is_good, f"{report.table}: {counted(report.rows, 'row')} in {where}")
            self._lake = [(table, f"{lake.rows(table):,}") for table in TABLES]

    def _web(self) -> int:
        """Return the newest offset of the second database, once all commits are in its log."""
        return self._caught_up("web", "visits")

    def _sum_up(self) -> None:
        parts = list(self._log.scan(after=0))
        written = Counter((change.table.name, change.op.word) for part in parts for change in part.changes)
        arrived = Counter((arrival.found["table"], arrival.found["op"]) for arrival in self._arrived)
        self._page.heading(11, "Summary")
        rows = [(table, op, written[table, op], arrived[table, op]) for table, op in sorted(written | arrived)]
        rows.append(("all", "", written.total(), arrived.total()))
        self._page.table(("table", "op", "in the log", "arrived"), rows)
        facts = [
            ("offsets", f"{self._log.horizon} to {self._log.latest}"),
            ("transactions in the log", len({part.id for part in parts})),
            ("commits through the server", self._commits),
            ("commits of the other program", self._outside),
            ("commit to arrival", f"{median(self._late):.1f} ms, at most {max(self._late):.1f} ms"),
            ("restart after kill -9", f"{self._restart_seconds:.2f} s"),
            *((f"rows of {table} in the lake", rows) for table, rows in self._lake),
        ]
        self._page.table(("what", "how much"), facts)
        self._page.say("")
        self._page.say("Commits of another program that are taken in together share a transaction in the log.")
        self._page.say(f"Next: {self._ground.next}")

    # --- checks ----------------------------------------------------------------------------------------------

    def _connect(self) -> Follower:
        """Return a feed of every table that continues after the last change received."""
        from headwater.cli.demo.follower import Follower

        self._connections += 1
        last_id = str(self._arrived[-1].offset) if self._arrived else ""
        return Follower(self._child.url, FeedTarget("main", None), last_id=last_id)

    def _show_new(self, *, live: bool = False) -> list[ReceivedChange]:
        new = self._feed.take(self._latest())
        self._arrived += new
        self._page.arrivals(new, live=live)
        return new

    def _latest(self) -> int:
        """Return the newest offset, once the log holds every commit."""
        return max(self._caught_up("main", "orders"), self._log.latest)

    def _caught_up(self, db: str, table: str) -> int:
        """Return the newest offset of the log, once it holds every commit; Failure after PATIENCE_SECONDS."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                found = self._child.remote.call("pull.describe", db=db, table=table)
                if found["caught_up"]:
                    return int(found["latest"])
            except Failure as failure:
                if failure.code != "unavailable":  # the table of another program may not be captured yet
                    raise
            time.sleep(0.02)
        raise Failure("the log did not catch up", hint="Is the disk very slow? Try again.")

    def _rows(self, table: str) -> dict[Any, Any]:
        from headwater.model.literal import from_lit

        data = self._child.remote.call("sql.exec", sql=f"SELECT * FROM {table}")["result"]["data"]
        rows = [tuple(from_lit(lit) for lit in row) for row in data["rows"]]
        return {row[:1]: row for row in rows}

    def _check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Failure(f"a check of the demo failed: {text}", hint="Please report it: it is a defect of Headwater.")
        self._page.proof(text)


def wire(parts: list[Transaction]) -> Iterator[dict[str, Any]]:
    """Yield every change as streams send it."""
    from headwater.cli.output.changes import as_json

    for part in parts:
        for offset, change in enumerate(part.changes, part.first):
            yield as_json("main", part, offset, change)


def fields_of(found: dict[str, Any]) -> list[Any]:
    """Return the fields of a change that must be equal in the feed and in the log."""
    return [found.get(name) for name in ("offset", "table", "op", "pk", "before", "after", "ddl")]


def apply_changes(parts: list[Transaction]) -> dict[str, dict[Any, Any]]:
    """Return the rows, by table and key, that result from applying every change in order."""
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
