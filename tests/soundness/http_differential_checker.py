"""The kit over HTTP: clients that hold answers of random queries send their tags again, while two processes write.

Operations run one after another in an order of the seed, so "at that moment" is exact: after a 304 the answer is
requested again without conditions, and read from the file without the server; both must be what the client has.
"""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec
from tests.guarantees.server_process import ServerProcess
from tests.queries.etag.token_order import dominates
from tests.soundness.differential_checker import Unsound
from tests.soundness.grammar import Query
from tests.soundness.random_databases import JSON, Asked, Captured, data_of, opaque_of, rows_of
from tests.soundness.schemas import Step
from tests.suite.deadlines import PATIENCE

from headwater.model.literal import to_lit
from headwater.queries.etag.causality import from_header, from_json, to_header

QUERIES = 6
OPERATIONS = 60  # of one schema, on average
ENDS = 3  # of one server: killed, stopped, killed
MAX_HELD = 8  # answers a client keeps of one question
OTHERS = [
    "application/vnd.headwater.objects+json",
    "application/vnd.headwater.plain+json",
    "text/csv",
    "application/vnd.apache.arrow.stream",
]
PLAIN_TAGS = {"null", "i64", "f64", "str", "bytes"}  # values that are written as SQLite has them


class Reachable(Protocol):
    """A server with a URL."""

    url: str


class HttpTrial:
    """One server over many random databases, and one client that reads and writes."""

    def __init__(self, server: Reachable, databases: list[Captured], seed: int, counts: Counter[str]) -> None:
        self.server, self.databases, self.counts = server, databases, counts
        self.random = random.Random(f"http {seed}")
        self.http = httpx.Client(timeout=PATIENCE)
        self.done_steps: list[str] = []  # what was done, for the message of a failure

    def run(self, operations: int) -> None:
        """Run random operations; raise Unsound if a 304 was wrong, or two answers of one tag differ."""
        for database in self.databases:
            self.prepare(database)
        self.go_on(operations)

    def go_on(self, operations: int) -> None:
        for _ in range(operations):
            self.operate(self.random.choice(self.databases))

    def prepare(self, database: Captured) -> None:
        """Prepare random queries, and two that nearly every schema supports."""
        made = [database.grammar.query() for _ in range(QUERIES)]
        made += [Query("SELECT * FROM t0", {}), Query("SELECT count(*), max(k) FROM t1", {})]
        for query in made:
            answer = self.rpc("query.prepare", sql=query.sql, db=database.name)
            self.counts["queries"] += 1
            if answer["ok"]:
                database.asked.append(Asked(query, answer["result"], self.random.choice(OTHERS)))
            else:
                self.counts["refused"] += 1

    def operate(self, database: Captured) -> None:
        """Run one random operation."""
        roll = self.random.random()
        if roll < 0.13:
            self.write_through(database, database.world.step())
        elif roll < 0.25:
            self.write_foreign(database, database.world.step())
        elif roll < 0.28:
            step = database.schema_step()
            (self.write_foreign if step.foreign or self.random.random() < 0.5 else self.write_through)(database, step)
        elif roll < 0.3:
            database.keep()
        elif roll < 0.38:
            asked = self.random.choice(database.asked)
            self.get(database, asked, asked.any_format(self.random))
        elif roll < 0.43:
            self.ask_rpc(database, self.random.choice(database.asked))
        else:
            self.come_back(database, self.random.choice(database.asked))

    # --- writing ---------------------------------------------------------------------------------------------

    def write_foreign(self, database: Captured, step: Step) -> None:
        """Write by the second process."""
        self.done_steps.append(f"{database.name} second process: {'; '.join(step.statements)}")
        self.counts["foreign writes"] += 1
        database.write(step)

    def write_through(self, database: Captured, step: Step) -> None:
        """Write through the server, each statement by itself; sometimes read at once with the write's token."""
        self.done_steps.append(f"{database.name} server: {'; '.join(step.statements)}")
        self.counts["writes"] += 1
        token = None
        for sql in step.statements:
            answer = self.rpc("sql.exec", sql=sql, db=database.name)
            token = answer["result"]["result"]["causality"] if answer["ok"] else token
        if token is not None and self.random.random() < 0.5:
            asked = self.random.choice(database.asked)
            self.counts["floors"] += 1
            self.get(database, asked, asked.any_format(self.random), token=token)

    def send_and_forget(self, database: Captured) -> None:
        """Send a write without reading its answer, so that a kill of the server may end it."""
        step = database.world.step()
        self.done_steps.append(f"{database.name} in flight: {step.statements[0]}")
        body = json.dumps(
            {"id": 1, "method": "sql.exec", "params": {"sql": step.statements[0], "db": database.name}}
        ).encode()
        place = urlsplit(self.server.url)
        with socket.create_connection((place.hostname, place.port)) as sent:
            head = f"POST /api/v1/rpc HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
            sent.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def while_down(self, *, killed: bool) -> None:
        """Write by the second process while the server is down; after a stop, restore some files from copies.

        Not where it was killed: see `test_tag_is_invalid_after_a_kill_and_a_restored_file` for what is not known then.
        """
        for database in self.databases:
            if not killed and self.random.random() < 0.5:
                self.done_steps.append(f"{database.name} restored: {database.backup}")
                self.counts["restored"] += database.backup is not None
                database.restore()
            for asked in database.asked:
                asked.explained = None
            for _ in range(self.random.choice([0, 0, 1, 3])):
                roll = self.random.random()
                self.write_foreign(database, database.world.step() if roll < 0.9 else database.schema_step())

    # --- asking ----------------------------------------------------------------------------------------------

    def rpc(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self.http.post(f"{self.server.url}/api/v1/rpc", json={"id": 1, "method": method, "params": params})
        assert answer.status_code < 500, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def send(self, asked: Asked, accept: str, method: str = "GET", **headers: str) -> httpx.Response:
        answer = self.http.request(
            method, self.server.url + asked.path, params=asked.args, headers={"accept": accept, **headers}
        )
        assert answer.status_code < 500, answer.text
        return answer

    def get(
        self, database: Captured, asked: Asked, accept: str, *, token: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Request the answer without conditions."""
        headers = {} if token is None else {"x-headwater-causality": to_header(from_json(token))}
        answer = self.send(asked, accept, **headers)
        self.counts["asked"] += 1
        if token is not None and answer.status_code == 200:
            self.dominates(asked, answer, token)
        self.take(database, asked, accept, answer)
        return answer

    def dominates(self, asked: Asked, answer: httpx.Response, token: dict[str, Any]) -> None:
        """Check that the answer includes the write of the token, as far as the query reads its tables."""
        seen = from_header(answer.headers["x-headwater-causality"])
        read = {dep.table for dep in seen.deps}
        part = {**token, "deps": [dep for dep in token["deps"] if dep["table"] in read]}
        if not dominates(seen, from_json(part)):
            self.fail(asked, f"asked for {token}, told {seen}")
        if answer.headers["cache-control"] != "no-store":
            self.fail(asked, "an answer to a floor may be kept")

    def come_back(self, database: Captured, asked: Asked) -> None:
        """Request with held tags: one, several, in other forms, or with foreign tags among them."""
        accept = asked.any_format(self.random)
        held = asked.held[accept]
        if not held:
            self.get(database, asked, accept)
            return
        newest = list(held)[-1]
        tags = [newest] if self.random.random() < 0.6 else self.random.sample(list(held), min(len(held), 3))
        sent = [self.changed(tag) for tag in tags]
        if self.random.random() < 0.3:
            sent += [self.strange(database), '"none.of-ours"']
            self.random.shuffle(sent)
        self.counts["came back"] += 1
        method = "HEAD" if self.random.random() < 0.1 else "GET"
        answer = self.send(asked, accept, method, **{"if-none-match": ", ".join(sent)})
        if answer.status_code == 304:
            self.unchanged(database, asked, accept, answer, sent)
        elif method == "GET":
            self.take(database, asked, accept, answer)

    def changed(self, tag: str) -> str:
        """Return the tag as a proxy may rewrite it."""
        roll = self.random.random()
        if roll < 0.2 and not tag.startswith("W/"):
            return f"W/{tag}"
        return f'{tag[:-1]}-gzip"' if roll < 0.3 else tag

    def strange(self, database: Captured) -> str:
        """Return the tag of another query, or of an offset that does not exist yet."""
        others = [tag for other in database.asked for held in other.held.values() for tag in held]
        tag = self.random.choice(others or ['"x.1"'])
        if self.random.random() < 0.3:
            return tag
        return f'{tag[:-1].rpartition(".")[0]}.{self.random.choice(["fffffff", "0", "1"])}"'

    def ask_rpc(self, database: Captured, asked: Asked) -> None:
        """Check that held tags are valid over RPC, too."""
        held = asked.held[JSON]
        params = {"query_id": asked.id, "args": json.loads(asked.args["args"])}
        tag = self.random.choice(list(held)) if held else None
        answer = self.rpc("query.execute_prepared", **params, **({"if_none_match": tag} if tag else {}))
        if answer["ok"] and answer["result"]["not_modified"]:
            assert tag is not None
            self.counts["not modified"] += 1
            self.same(database, asked, JSON, tag)

    # --- judging ---------------------------------------------------------------------------------------------

    def fail(self, asked: Asked, why: str) -> None:
        story = "\n".join(self.done_steps[-25:])
        raise Unsound(f"{why}\n{asked.query.sql}\n{asked.query.args!r}\n{asked.explained}\n\n{story}")

    def take(self, database: Captured, asked: Asked, accept: str, answer: httpx.Response) -> None:
        """Check a complete answer and hold it."""
        if answer.status_code != 200:
            self.counts[f"refused by {answer.status_code}"] += 1
            self.right_to_refuse(database, asked, accept, answer)
            return
        self.right(database, asked, accept, answer)
        tag, held = answer.headers.get("etag"), asked.held[accept]
        if tag is None:
            self.counts["without a tag"] += 1
            if answer.headers["cache-control"] != "no-store":
                self.fail(asked, "no tag, and yet it may be kept")
            return
        self.counts["tagged"] += 1
        known = held.pop(tag, None)
        if known is not None and (
            rows_of(known, accept) != rows_of(answer.content, accept)
            if tag.startswith("W/")
            else known != answer.content
        ):
            self.fail(asked, f"two answers have the tag {tag}:\n{known!r}\n{answer.content!r}")
        held[tag] = answer.content
        if len(held) > MAX_HELD:
            del held[self.random.choice(list(held))]

    def unchanged(self, database: Captured, asked: Asked, accept: str, answer: httpx.Response, sent: list[str]) -> None:
        """Check a 304: it repeats a tag that was sent, and a new execution returns the held body of that tag."""
        self.counts["not modified"] += 1
        tag = answer.headers["etag"]
        if tag not in sent:
            self.fail(asked, f"sent {sent}, told {tag}")
        opaque = opaque_of(tag)
        known = next((held for held in asked.held[accept] if opaque_of(held) == opaque), None)
        if known is not None:
            self.same(database, asked, accept, known)
        elif opaque.partition(".")[0] not in {opaque_of(held).partition(".")[0] for held in asked.held[accept]}:
            self.fail(asked, f"a 304 for {tag}, the tag of another question")
        # else a position was made up, and may be as good as the one that was given.

    def same(self, database: Captured, asked: Asked, accept: str, tag: str) -> None:
        """Request again without conditions; check that the held body is the same."""
        held = asked.held[accept][tag]
        fresh = self.send(asked, accept)
        if fresh.status_code != 200:
            self.fail(asked, f"a 304 for {tag}, and then {fresh.status_code}: {fresh.text}")
        ours, now = data_of(held, accept), data_of(fresh.content, accept)
        if ours != now and not (tag.startswith("W/") and rows_of(held, accept) == rows_of(fresh.content, accept)):
            self.fail(asked, f"a 304 for {tag} ({accept}); held\n{ours!r}\nnow\n{now!r}")
        self.take(database, asked, accept, fresh)

    def right(self, database: Captured, asked: Asked, accept: str, answer: httpx.Response) -> None:
        """Check that an answer with a total order is what the file itself returns now."""
        found = self.explained(asked)
        if accept != JSON or found is None or found["volatile"]:
            return
        rows = answer.json()["data"]["rows"]
        truth = database.rows(found["sql"], [asked.query.args.get(name) for name in found["parameters"]])
        if truth is None or any(value["t"] not in PLAIN_TAGS for row in rows for value in row):
            return
        made = [[to_lit(value) for value in row] for row in truth]
        texts = [[msgspec.json.encode(row) for row in some] for some in (rows, made)]
        if not found["ordered"]:
            if "LIMIT" in found["sql"] or "group_concat" in found["sql"] or "OVER" in found["sql"]:
                return
            texts = [sorted(some) for some in texts]
        self.counts["compared with the file"] += 1
        if texts[0] != texts[1]:
            self.fail(asked, f"answered\n{rows}\nthe file says\n{made}")

    def right_to_refuse(self, database: Captured, asked: Asked, accept: str, answer: httpx.Response) -> None:
        found = self.explained(asked)
        if found is None or "two columns are called" in answer.text:
            return
        args = [asked.query.args.get(name) for name in found["parameters"]]
        if database.rows(found["sql"], args) is not None:
            self.fail(asked, f"refused what SQLite does: {answer.text}")

    def explained(self, asked: Asked) -> dict[str, Any] | None:
        """Return the server's analysis; None if it refuses the query."""
        if asked.explained is None:
            answer = self.rpc("query.explain", query_id=asked.id)
            asked.explained = answer["result"] if answer["ok"] else None
        return asked.explained


def settings(databases: list[Captured]) -> str:
    """Return the settings file for a server of the databases."""
    lines = [f"{one.name} = {json.dumps(str(one.path))}" for one in databases]
    return "\n".join(["[databases]", *lines, "[sqlite]", "wal = true", ""])


def run(folder: Path, first: int, schemas: int, counts: Counter[str]) -> None:
    """Run a server process over `schemas` random databases, with kills between the operations."""
    databases = [Captured(f"d{seed}", folder, seed) for seed in range(first, first + schemas)]
    server = ServerProcess(folder / "data", settings(databases))
    trial = HttpTrial(server, databases, first, counts)
    counts["schemas"] += schemas
    try:
        server.start()
        trial.run(schemas * OPERATIONS // (ENDS + 1))
        for place in range(ENDS):
            killed = place != 1
            if killed:
                trial.send_and_forget(trial.random.choice(databases))
            server.kill() if killed else server.stop()
            trial.done_steps.append("killed" if killed else "stopped")
            trial.while_down(killed=killed)
            server.start()
            counts["restarts"] += 1
            trial.go_on(schemas * OPERATIONS // (ENDS + 1))
    except Exception as error:
        error.add_note(f"the server said:\n{server.last_words()}")
        raise
    finally:
        trial.http.close()
        server.close()
        for database in databases:
            database.db.close()
