"""The shop of the demo: its tables, its goods, and a program that writes to it behind the server's back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from headwater.cli.demo.child import clean_environment
from headwater.cli.failure import Failure
from headwater.cli.remote import Remote

KEY = {"name": "id", "type": {"kind": "i64"}, "nullable": False, "auto_increment": True}


def _column(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": {"kind": kind}, "nullable": False}


TABLES = {
    "customers": [KEY, _column("name", "str"), _column("city", "str")],
    "products": [KEY, _column("name", "str"), _column("cents", "i64"), _column("stock", "i64")],
    "orders": [
        KEY,
        _column("customer", "i64"),
        _column("product", "i64"),
        _column("quantity", "i64"),
        _column("state", "str"),
    ],
}
CUSTOMERS = [("Ada", "London"), ("Grace", "New York"), ("Edsger", "Rotterdam")]
PRODUCTS = [("lamp", 3900, 20), ("chair", 8900, 12), ("desk", 24900, 5)]

# Plain sqlite3 of the standard library: it knows nothing of Headwater. One commit per line of work.
FOREIGN = """
import sqlite3, sys
path, first, commits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
db = sqlite3.connect(path, timeout=10)
for n in range(first, first + commits):
    with db:
        db.execute("INSERT INTO orders(customer, product, quantity, state) VALUES (?, ?, 1, 'new')",
                   (n % 3 + 1, n % 3 + 1))
        db.execute("UPDATE products SET stock = stock - 1 WHERE id = ?", (n % 3 + 1,))
try:
    with db:
        db.execute("DELETE FROM orders")
        raise RuntimeError("changed my mind")
except RuntimeError:
    pass
db.close()
"""


def create(remote: Remote) -> None:
    """The tables, and what is in them before the first order."""
    for table, columns in TABLES.items():
        remote.call("schema.create_table", table=table, columns=columns, primary_key=["id"])
    people = [{"name": name, "city": city} for name, city in CUSTOMERS]
    goods = [{"name": name, "cents": cents, "stock": stock} for name, cents, stock in PRODUCTS]
    remote.call("data.insert", into={"table": "customers"}, rows=people)
    remote.call("data.insert", into={"table": "products"}, rows=goods)


# The same program on another database: many rows in one transaction, later a few that change.
VISITS = """
import sqlite3, sys
path, rows = sys.argv[1], int(sys.argv[2])
db = sqlite3.connect(path, timeout=10)
with db:
    if rows:
        db.execute("CREATE TABLE visits(id INTEGER PRIMARY KEY, page TEXT NOT NULL, at INTEGER NOT NULL)")
        db.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
                   "INSERT INTO visits SELECT i, '/page/' || (i % 500), i * 7 FROM n", (rows,))
    else:
        db.execute("DELETE FROM visits WHERE id % 100 = 0")
        db.execute("UPDATE visits SET page = '/moved' WHERE id % 150 = 1")
        db.execute("UPDATE visits SET id = -id WHERE id % 1000 = 7")
db.close()
"""


def visit(file: Path, rows: int) -> None:
    """Fill the table of visits, or with 0 rows change some of them: deletes, updates, new keys."""
    _outside(VISITS, str(file), str(rows))


def order(remote: Remote, number: int, *, tx: str | None = None) -> None:
    """One more order, in a transaction of its own or in `tx`."""
    row = {"customer": number % 3 + 1, "product": number % 3 + 1, "quantity": number % 4 + 1, "state": "new"}
    extra = {} if tx is None else {"tx": tx}
    remote.call("data.insert", into={"table": "orders"}, rows=[row], **extra)


def ship(remote: Remote, order: int) -> None:
    """Change one row, if it is still what we read: the tag of the row travels with the request."""
    tag = remote.call("data.get", table={"table": "orders"}, pk=[order])["etag"]
    where = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": order}}}
    remote.call("data.update", table={"table": "orders"}, where=where, set={"state": "shipped"}, if_match=tag)


def reorder(remote: Remote, order: int, quantity: int) -> None:
    """Change how many a customer wants."""
    where = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": order}}}
    remote.call("data.update", table={"table": "orders"}, where=where, set={"quantity": quantity})


def write_from_outside(file: Path, first: int, commits: int) -> int:
    """Run the other program; returns its process number."""
    return _outside(FOREIGN, str(file), str(first), str(commits))


def _outside(program: str, *args: str) -> int:
    command = [sys.executable, "-c", program, *args]
    with subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate()
    if process.returncode:
        raise Failure(f"the other program failed: {errors.strip()}")
    return process.pid
