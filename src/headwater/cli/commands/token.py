"""`headwater token`: the API keys of a running server."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from headwater.cli.failure import OK
from headwater.cli.filters import natural
from headwater.cli.output.tables import print_json, print_result, printable
from headwater.cli.remote import add_verb, open_remote
from headwater.model.quantity import counted

ROLES = ("viewer", "editor", "owner")  # as the server has them, without loading what it needs
COLUMNS = ("id", "name", "role", "scopes", "expires")


def add(commands: Any) -> None:
    """Register `token`."""
    group = commands.add_parser("token", help="API keys of a running server").add_subparsers(dest="verb", required=True)
    create = add_verb(group, "create", "make a key; it is shown once", _create)
    create.add_argument("name", metavar="NAME", help="label of the key; shown in logs and recorded as the owner")
    create.add_argument("--role", choices=ROLES, default=ROLES[0], help="what it may do (viewer)")
    create.add_argument(
        "--scope", action="append", metavar="DB[.TABLE]", help="limit it to a database or a table; may be repeated"
    )
    create.add_argument("--days", type=natural, metavar="N", help="days until it expires")
    add_verb(group, "list", "list keys", _list)
    revoke = add_verb(group, "revoke", "end a key, and what is open with it", _revoke)
    revoke.add_argument("id", metavar="ID", help="the key, by the id that `token list` shows")


def _create(args: argparse.Namespace) -> int:
    given: dict[str, Any] = {"name": args.name, "role": args.role}
    if args.scope:
        given["scopes"] = args.scope
    if args.days is not None:
        given["expires_in_seconds"] = args.days * 86_400
    made = _call(args, "security.token.create", **given)
    if args.output == "json":
        print_json(made)
    else:
        print(made["token"])
        print(f"key {made['id']} of {made['name']}, {made['role']}: keep it, it is not shown again")
    for scope in made.get("unknown_scopes", ()):
        print(f"note: there is no {printable(scope)} now; the key opens it once there is", file=sys.stderr)
    return OK


def _list(args: argparse.Namespace) -> int:
    found = _call(args, "security.token.list")
    rows = [
        (key["id"], key["name"], key["role"], ", ".join(key.get("scopes", ("everything",))), _day(key))
        for key in found["tokens"]
    ]
    print_result(args.output, found, COLUMNS, rows)
    return OK


def _revoke(args: argparse.Namespace) -> int:
    done = _call(args, "security.token.revoke", id=args.id)
    if args.output == "json":
        print_json(done)
    else:
        print(f"{done['id']} is revoked; {counted(done['streams_ended'], 'stream')} ended")
    return OK


def _call(args: argparse.Namespace, method: str, **params: Any) -> Any:
    with closing(open_remote(args)) as remote:
        return remote.call(method, **params)


def _day(key: dict[str, Any]) -> str:
    at = key.get("expires_at_ms")
    return "never" if at is None else datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
