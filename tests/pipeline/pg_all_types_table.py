"""A PostgreSQL table with every kind of column under hostile names, changes to it, and a server over it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from tests.conformance.live_server import Live
from tests.sources.postgres.pg_source import shared_server

from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.detach import detach

NAME = '"we""ird.schema".Odd Name; --'  # as Headwater calls it
TABLE = '"we""ird.schema"."Odd Name; --"'  # as SQL does
KINDS = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s "fine"');
CREATE SCHEMA "we""ird.schema";
CREATE TABLE "we""ird.schema"."Odd Name; --" (
  "part one" int, "Key`2" text, n numeric, f float8, r real, at timestamptz, day date, "time" time, u uuid, j jsonb,
  b bytea, a int[], words text[], m mood, ok boolean, span interval, range int4range, "sel""ect" text,
  PRIMARY KEY ("Key`2", "part one"));
ALTER TABLE "we""ird.schema"."Odd Name; --" REPLICA IDENTITY FULL;
"""
FILL = f"""
INSERT INTO {TABLE}
SELECT i, 'k' || i % 3, (i || '.' || i || '00')::numeric, i / 7.0, i, '2026-01-01T00:00:00Z'::timestamptz + i * '1 hour'::interval,
       '2026-01-01'::date + i, '10:00'::time + i * '1 second'::interval, gen_random_uuid(), jsonb_build_object('i', i),
       decode(repeat('00ff', i % 3), 'hex'), ARRAY[i, NULL, i], ARRAY['a,b', '"', NULL], 'ok', i % 2 = 0,
       '1 mon 2 days 00:00:01', int4range(i, i + 5), repeat('wide', i % 5)
FROM generate_series(1, 60) i
"""  # noqa: E501
CHANGES = (
    f"UPDATE {TABLE} SET n = 'NaN', f = 'Infinity', r = 'NaN', at = 'infinity', day = '-infinity' "
    'WHERE "part one" = 1',
    f"UPDATE {TABLE} SET n = 'Infinity', at = '0044-03-15 BC', j = '\"\\u00e9\"', m = 'it''s \"fine\"' "
    'WHERE "part one" = 2',
    f'UPDATE {TABLE} SET "sel""ect" = (SELECT string_agg(md5(n::text), \'\') FROM generate_series(1, 3000) n) '
    'WHERE "part one" = 3',
    f'UPDATE {TABLE} SET n = n + 1 WHERE "part one" = 3',  # the large value stays
    f'DELETE FROM {TABLE} WHERE "part one" BETWEEN 10 AND 20',
    f'UPDATE {TABLE} SET "part one" = "part one" + 1000, "Key`2" = \'moved\' WHERE "part one" BETWEEN 30 AND 33',
    f"""WITH gone AS (DELETE FROM {TABLE} WHERE "part one" = 40 RETURNING *) UPDATE {TABLE} SET f = -0.0 WHERE f > 8""",
    f"INSERT INTO {TABLE} (\"part one\", \"Key`2\") VALUES (-5, ''), (-6, E'line\\nbreak\\t☃')",
)
SHAPES = (
    f'ALTER TABLE {TABLE} ADD COLUMN "new $col" numeric(12, 3)',
    f'UPDATE {TABLE} SET "new $col" = 1.5 WHERE "part one" = 5',
    f"ALTER TABLE {TABLE} DROP COLUMN span",
    f'UPDATE {TABLE} SET f = 4 WHERE "part one" = 6',
)
EMPTIED = (
    f"TRUNCATE {TABLE}",
    f"INSERT INTO {TABLE} (\"part one\", \"Key`2\", n) VALUES (1, 'a', 1), (2, 'b', 2.50)",
)
_numbers = itertools.count(1)


class PgLive:
    """A separate database on the shared PostgreSQL, served as `main`."""

    def __init__(self, folder: Path, *statements: str) -> None:
        self.server = shared_server()
        self.name = f"carried_{os.getpid()}_{next(_numbers)}"
        with self.server.connect() as admin:
            admin.execute(f"CREATE DATABASE {self.name}")
        self.db = self.server.connect(self.name)
        self.run(*statements)
        self.address = f"postgresql://postgres@/{self.name}?host={self.server.folder}"
        settings = {"slot": f"s_{self.name}", "publication": f"p_{self.name}"}
        self.live = Live(folder / "data", url=self.address, log={"flush_ms": 5}, postgres=settings)
        self._settings = PostgresConfig(**settings)

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.db.execute(statement.encode())

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return self.db.execute(f"SELECT * FROM {table}".encode()).fetchall()

    def close(self) -> None:
        self.live.stop()
        self.db.close()
        detach(self.name, self.address, config=self._settings)
        with self.server.connect() as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")
