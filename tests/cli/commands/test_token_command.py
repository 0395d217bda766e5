"""`headwater token`: keys created, listed and revoked by the command line."""

import json
from pathlib import Path

from tests.cli.cli_process import Served, refused, run, run_json, served


def create(server: Served, *args: str) -> tuple[str, str]:
    """Create a key; return the stdout and the stderr of the command."""
    done = run("token", "create", "reports", "--server", server.url, *args)
    assert done.returncode == 0, done
    return done.stdout, done.stderr


def test_token_is_created_listed_and_revoked(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.sql("CREATE TABLE orders(id INTEGER PRIMARY KEY)")
        made, noted = create(server, "--scope", "main.orders", "-o", "json")
        assert noted == "" and "unknown_scopes" not in json.loads(made)
        id = json.loads(made)["id"]
        (listed,) = run_json("token", "list", "--server", server.url)["tokens"]
        assert (listed["id"], listed["scopes"]) == (id, ["main.orders"])
        done = run("token", "revoke", id, "--server", server.url)
        assert done.stdout == f"{id} is revoked; 0 streams ended\n"
        assert "headwater token list" in refused(1, "token", "revoke", id, "--server", server.url)


def test_token_with_a_scope_of_an_unknown_table_is_created_with_a_note(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        made, noted = create(server, "--scope", "main.nope", "--scope", "absent")
        assert made.startswith("hw_") and len(noted.splitlines()) == 2
        for line, scope in zip(noted.splitlines(), ("absent", "main.nope"), strict=True):
            assert line.startswith(f"note: there is no {scope} now")
        assert len(run_json("token", "list", "--server", server.url)["tokens"]) == 1
