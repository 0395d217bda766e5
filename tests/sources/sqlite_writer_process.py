"""Another process that writes to the same file with the standard library's SQLite, driven over a pipe.

It must be a process of its own: two copies of SQLite in one process drop each other's file locks.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.guarantees.fold import RawRow

CHILD = r"""
import json, sqlite3, struct, sys

con = None

def pack(value):
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, float):
        return {"f": struct.pack(">d", value).hex()}
    return value

def unpack(value):
    if isinstance(value, dict):
        return bytes.fromhex(value["b"]) if "b" in value else struct.unpack(">d", bytes.fromhex(value["f"]))[0]
    return value

def quote(name):
    return '"' + name.replace('"', '""') + '"'

def execute(sql, args):
    cursor = con.execute(sql, [unpack(a) for a in args])
    return [[pack(v) for v in row] for row in cursor.fetchall()]

def dump(table, columns):
    cells = ", ".join(f"typeof({quote(c)}), {quote(c)}" for c in columns)
    return [[pack(v) for v in row] for row in con.execute(f"SELECT {cells} FROM {quote(table)}")]

for line in sys.stdin:
    ask = json.loads(line)
    try:
        if ask["do"] == "open":
            con = sqlite3.connect(ask["path"], isolation_level=None, timeout=10)
            con.text_factory = bytes
            con.execute("PRAGMA foreign_keys = 1")
            answer = None
        elif ask["do"] == "close":
            con = con and con.close()
            answer = None
        elif ask["do"] == "python":
            names = {"con": con, "sqlite3": sqlite3}
            exec(ask["code"], names)
            answer = names.get("answer")
        elif ask["do"] == "dump":
            answer = dump(ask["table"], ask["columns"])
        else:
            answer = execute(ask["sql"], ask["args"])
        reply = {"answer": answer}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
"""


class ForeignError(Exception):
    """The error text of SQLite in the other process."""


class Foreign:
    """Another process with one connection at a time, in autocommit mode: BEGIN is an ordinary statement."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        if "error" in reply:
            raise ForeignError(reply["error"])
        return reply["answer"]

    def open(self, path: str | Path) -> None:
        """Connect to a file, after closing the earlier connection."""
        self.close()
        self._ask(do="open", path=str(path))

    def close(self) -> None:
        """Close the connection."""
        self._ask(do="close")

    def run(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows, with text as bytes."""
        return [tuple(map(_unpack, row)) for row in self._ask(do="sql", sql=sql, args=[_pack(a) for a in args])]

    def script(self, *statements: str) -> None:
        """Run several statements, each by itself."""
        for statement in statements:
            self.run(statement)

    def attempt(self, sql: str, *args: Any) -> str:
        """Run one statement; return SQLite's error text, or ""."""
        try:
            self.run(sql, *args)
        except ForeignError as error:
            return str(error)
        return ""

    def python(self, code: str) -> Any:
        """Run code in the other process, with the connection as `con`; return its variable `answer`."""
        return self._ask(do="python", code=code)

    def rows(self, table: str, columns: Sequence[str]) -> list[RawRow]:
        """Return all rows of a table as the fold represents them."""
        return [_raw_row(row) for row in self._ask(do="dump", table=table, columns=list(columns))]

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def _pack(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": value.hex()}
    return {"f": struct.pack(">d", value).hex()} if isinstance(value, float) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["b"]) if "b" in value else struct.unpack(">d", bytes.fromhex(value["f"]))[0]
    return value


def _raw_row(row: list[Any]) -> RawRow:
    kinds = [bytes.fromhex(kind["b"]).decode() for kind in row[::2]]
    values = row[1::2]
    contents = [bytes.fromhex(v.get("b") or v.get("f") or "") if isinstance(v, dict) else v for v in values]
    return tuple(zip(kinds, contents, strict=True))
