"""The shop of the demo: its tables and goods, and changes through the server."""

from __future__ import annotations

from typing import Any

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


def create(remote: Remote) -> None:
    """Create the tables and the rows before the first order."""
    for table, columns in TABLES.items():
        remote.call("schema.create_table", table=table, columns=columns, primary_key=["id"])
    people = [{"name": name, "city": city} for name, city in CUSTOMERS]
    goods = [{"name": name, "cents": cents, "stock": stock} for name, cents, stock in PRODUCTS]
    remote.call("data.insert", into={"table": "customers"}, rows=people)
    remote.call("data.insert", into={"table": "products"}, rows=goods)


def order(remote: Remote, number: int, *, tx: str | None = None) -> None:
    """Insert an order, in its own transaction or in `tx`."""
    row = {"customer": number % 3 + 1, "product": number % 3 + 1, "quantity": number % 4 + 1, "state": "new"}
    extra = {} if tx is None else {"tx": tx}
    remote.call("data.insert", into={"table": "orders"}, rows=[row], **extra)


def ship(remote: Remote, order: int) -> None:
    """Set an order to shipped with the ETag just read, so that a concurrent change would be a conflict."""
    tag = remote.call("data.get", table={"table": "orders"}, pk=[order])["etag"]
    where = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": order}}}
    remote.call("data.update", table={"table": "orders"}, where=where, set={"state": "shipped"}, if_match=tag)


def reorder(remote: Remote, order: int, quantity: int) -> None:
    """Change the quantity of an order."""
    where = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": order}}}
    remote.call("data.update", table={"table": "orders"}, where=where, set={"quantity": quantity})
