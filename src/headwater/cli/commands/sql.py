"""`headwater sql`: one statement through a running server."""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import closing
from typing import Any

from headwater.cli.failure import OK
from headwater.cli.output.tables import add_output, as_text, print_json, print_table
from headwater.cli.remote import add_server, open_remote
from headwater.model.quantity import counted

_DDL = re.compile(r"(?>\s|--[^\n]*\n|/\*.*?\*/)*+(?:CREATE|ALTER|DROP|REINDEX|ANALYZE)\b", re.IGNORECASE | re.DOTALL)


def add(commands: Any) -> None:
    """Register `sql`."""
    parser = commands.add_parser("sql", help="run one statement through a server", allow_abbrev=False)
    add_server(parser)
    parser.add_argument("--db", metavar="NAME", default="main", help="the database (main)")
    add_output(parser)
    parser.add_argument("statement", metavar="STATEMENT", help="one SQL statement; - reads it from standard input")
    parser.add_argument("arg", nargs="*", default=(), metavar="ARG", help="values for its ?: JSON, or else a text")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    sql = sys.stdin.read() if args.statement == "-" else args.statement
    with closing(open_remote(args)) as remote:
        answer = remote.call("sql.exec", sql=sql, args=[argument(text) for text in args.arg], db=args.db)["result"]
    if args.output == "json":
        _print_json(answer)
    elif _DDL.match(sql):
        print("done")
    else:
        _print(answer)
    return OK


def argument(text: str) -> Any:
    """Return the value of `text`: a JSON scalar, a tagged value, a JSON document, or else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and "t" in value:
        return value
    return {"t": "json", "v": value} if isinstance(value, (dict, list)) else value


def _rows(answer: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    from headwater.model.literal import from_lit, to_plain

    data = answer["data"]
    rows = [[to_plain(from_lit(lit)) for lit in row] for row in data["rows"]]
    return [column["name"] for column in data["columns"]], rows


def _print_json(answer: dict[str, Any]) -> None:
    columns, rows = _rows(answer)
    document: dict[str, Any] = {"columns": columns, "rows": rows}
    document |= {name: answer[name] for name in ("affected", "last_insert_id")}
    if answer["data"].get("truncated"):
        document["truncated"] = True
    print_json(document)


def _print(answer: dict[str, Any]) -> None:
    columns, rows = _rows(answer)
    if columns:
        print_table(columns, [["NULL" if cell is None else as_text(cell) for cell in row] for row in rows])
    if not columns or answer["affected"]:
        print(f"{counted(answer['affected'], 'row')} changed")
    if answer["data"].get("truncated"):
        print(f"only the first {len(rows):,} rows are shown", file=sys.stderr)
