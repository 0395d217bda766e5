"""The other programs of the demo, run in processes of their own: they know nothing of Headwater."""

from __future__ import annotations

# Plain sqlite3 of the standard library. One commit per line of work.
SQLITE_ORDERS = """
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

# The same program on another database: many rows in one transaction, later a few that change.
SQLITE_VISITS = """
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

# The two again, with psycopg.
POSTGRES_ORDERS = """
import os, psycopg, sys
first, commits = int(sys.argv[1]), int(sys.argv[2])
with psycopg.connect(os.environ["HEADWATER_DEMO_URL"], autocommit=True) as db:
    for n in range(first, first + commits):
        with db.transaction():
            db.execute("INSERT INTO orders(customer, product, quantity, state) VALUES (%s, %s, 1, 'new')",
                       (n % 3 + 1, n % 3 + 1))
            db.execute("UPDATE products SET stock = stock - 1 WHERE id = %s", (n % 3 + 1,))
    with db.transaction(force_rollback=True):
        db.execute("DELETE FROM orders")
"""
POSTGRES_VISITS = """
import os, psycopg, sys
rows = int(sys.argv[1])
with psycopg.connect(os.environ["HEADWATER_DEMO_URL"]) as db:
    if rows:
        db.execute("CREATE TABLE visits(id bigint PRIMARY KEY, page text NOT NULL, at bigint NOT NULL)")
        db.execute("ALTER TABLE visits REPLICA IDENTITY FULL")
        db.execute("INSERT INTO visits SELECT i, '/page/' || (i %% 500), i * 7 FROM generate_series(1, %s) i", (rows,))
    else:
        db.execute("DELETE FROM visits WHERE id % 100 = 0")
        db.execute("UPDATE visits SET page = '/moved' WHERE id % 150 = 1")
        db.execute("UPDATE visits SET id = -id WHERE id % 1000 = 7")
"""
POSTGRES_CREATE = """
import os, psycopg, sys
with psycopg.connect(os.environ["HEADWATER_DEMO_URL"], autocommit=True) as db:
    for name in sys.argv[1:]:
        db.execute(f"CREATE DATABASE {name}")
    print(db.info.parameter_status("server_version").split()[0])
"""
POSTGRES_DROP = """
import os, psycopg, sys, time
with psycopg.connect(os.environ["HEADWATER_DEMO_URL"], autocommit=True) as db:
    for name in sys.argv[1:]:
        while db.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", [name]).fetchone():
            time.sleep(0.05)
        db.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [name])
        db.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
"""
