"""The parse tree of a statement: PostgreSQL makes it the body of a temporary function, which is read and rolled back.

So PostgreSQL itself resolves every name, operator and parameter (`prosqlbody`), also of views (`pg_rewrite`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.sources.postgres.errors import CANCELED, state_of
from headwater.sources.postgres.protocol_session import WORDS, Link
from headwater.sources.postgres.query.analysis.parse_tree import Item, Node, UnsupportedTree, parse
from headwater.sources.postgres.query.analysis.statement_growth import check_tree
from headwater.sources.postgres.query.analysis.tree_reads import Reader, UsedObjects, Writes
from headwater.sources.postgres.schema.relations import table_name
from headwater.sources.postgres.values import Bound, array_text

PARSED = "headwater_look"
MAX_VIEWS = 1_000
MAX_TREE = 500_000  # limit of a statement's tree in characters: parsing it takes Python's lock for about 0.1 seconds
MAX_TREES = 2_000_000  # limit of a tree together with the trees of its views

_TYPES = "SELECT format_type(t.oid, NULL) FROM unnest($1::oid[]) WITH ORDINALITY t(oid, place) ORDER BY place"
_BODY = f"""
SELECT CASE WHEN length(b.tree) <= {MAX_TREE} THEN b.tree END, p.proargdefaults::text, length(b.tree)
FROM pg_proc p CROSS JOIN LATERAL (SELECT p.prosqlbody::text OFFSET 0) b (tree) WHERE p.oid = $1::regproc
"""
_RELATIONS = """
WITH RECURSIVE every (oid) AS (
  SELECT unnest($1::oid[])
  UNION SELECT h.oid FROM unnest($2::oid[]) h(oid)
  UNION SELECT i.inhrelid FROM every e JOIN pg_inherits i ON i.inhparent = e.oid
)
SELECT c.oid, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relrowsecurity, c.relispartition,
       (SELECT r.ev_action::text FROM pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_type = '1')
FROM every e JOIN pg_class c ON c.oid = e.oid JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY c.oid
"""
_COLUMNS = """
SELECT attrelid, attnum::int, attname FROM pg_attribute
WHERE attrelid = ANY ($1::oid[]) AND attnum > 0 AND NOT attisdropped
"""
_CHILDREN = """
WITH RECURSIVE every (root, oid) AS (
  SELECT h.oid, h.oid FROM unnest($1::oid[]) h(oid)
  UNION SELECT e.root, i.inhrelid FROM every e JOIN pg_inherits i ON i.inhparent = e.oid
)
SELECT root, oid FROM every WHERE root <> oid
"""


class Relation(msgspec.Struct, frozen=True):
    """A relation that a statement reads, from the catalogue."""

    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    is_secured: bool
    is_partition: bool
    rule: str | None
    columns: dict[int, str]

    @property
    def called(self) -> str:
        """Return the name of the relation in the log: see `table_name`."""
        return table_name(self.schema, self.name)


class StatementFacts(msgspec.Struct, frozen=True):
    """Facts about a statement and its views, from their parse trees and the catalogue."""

    query: Node
    views: tuple[Node, ...]  # the rules of its views
    trees: tuple[str, ...]  # its own, and those of its views: they define its meaning
    used: UsedObjects
    relations: dict[int, Relation]  # all that it reads, including views and children
    children: dict[int, list[int]]  # of tables that are read with children: all descendants
    is_little: bool  # the tree has numbers in little-endian order


def oids(found: Collection[int]) -> Bound:
    """Return oids, sorted, as the text of a PostgreSQL array."""
    return array_text([str(oid) for oid in sorted(found)])


def facts_of(link: Link, body: Body) -> StatementFacts:
    """Return the facts about a statement and the views it uses. Raises UnsupportedTree if a tree is not supported.

    Raises InvalidRequest for a statement that does more than reading.
    """
    used, trees, relations = UsedObjects(), [body.text], dict[int, Relation]()
    views: list[Node] = []
    query = _single(body.items)
    try:
        Reader(used).query(query)
        read: set[int] = set()
        while new := used.columns.keys() - read:
            read |= new
            for each in _described(link, new, used.heirs):
                relations[each.oid] = each
                if each.kind == "v" and each.oid in new:
                    is_large = len(trees) > MAX_VIEWS or sum(map(len, trees)) + len(each.rule or "") > MAX_TREES
                    if each.rule is None or is_large:
                        raise UnsupportedTree(f"the view {each.called} has no rule or is too large to analyse")
                    trees.append(each.rule)
                    views.append(_single([parse(each.rule)]))
                    Reader(used, each.oid).query(views[-1])
    except Writes:
        raise InvalidRequest(
            "a query only reads; this statement writes or locks rows", hint="Use sql.exec or data.* to write."
        ) from None
    below: dict[int, list[int]] = {}
    for root, oid in link.run(_CHILDREN, [oids(used.heirs)]).values():
        below.setdefault(root, []).append(oid)
    return StatementFacts(query, tuple(views), tuple(trees), used, relations, below, body.is_little)


class Body(msgspec.Struct, frozen=True):
    """The parse tree of a statement: parsed, as text, and its byte order."""

    items: list[Item]
    text: str
    is_little: bool  # see StatementFacts


def body_of(link: Link, sql: str, types: Sequence[int] = ()) -> Body:
    """Return PostgreSQL's parse tree of a statement; the caller must roll the transaction back.

    Raises UnsupportedTree if there is none, InvalidRequest if it is too large to be parsed, Forbidden for a role that
    may not create temporary objects.
    """
    _make_function(link, sql, types)
    ((text, one, length),) = link.run(_BODY, [f"pg_temp.{PARSED}".encode()]).texts()
    if int(length or 0) > MAX_TREE:
        raise InvalidRequest(
            f"the statement is too large: its parse tree has {length} characters, at most {MAX_TREE} are read",
            hint="Bind a long list as one array argument, such as id = ANY ($1), or send several statements.",
        )
    found = parse(text or "<>")
    if not isinstance(found, list):
        raise UnsupportedTree("the text has no statement")
    check_tree(found)
    return Body(found, str(text), "[ 1 0 0 0" in str(one))


def _make_function(link: Link, sql: str, types: Sequence[int]) -> None:
    named = [str(name) for (name,) in link.run(_TYPES, [array_text([str(oid) for oid in types])]).texts()]
    # The default is a known number: it shows the byte order of numbers in the tree.
    arguments = ", ".join([*named, "integer DEFAULT 1"])
    try:
        link.run(
            f"CREATE FUNCTION pg_temp.{PARSED}({arguments}) RETURNS void LANGUAGE sql BEGIN ATOMIC {sql}\n; END",
            max_bytes=WORDS,
        )
    except (InvalidRequest, NotSupported) as error:
        if state_of(error) in ("", CANCELED):  # every error of PostgreSQL except the time limit continues below
            raise
        raise UnsupportedTree(error.message) from None


def _single(body: list[Item]) -> Node:
    while len(body) == 1 and isinstance(body[0], list):
        body = body[0]
    if len(body) != 1 or not isinstance(body[0], Node):
        raise UnsupportedTree("the text is not exactly one statement")
    return body[0]


def _described(link: Link, oids_: Collection[int], heirs: Collection[int]) -> list[Relation]:
    found = link.run(_RELATIONS, [oids(oids_), oids(set(heirs) & set(oids_))]).values()
    columns: dict[int, dict[int, str]] = {}
    for oid, number, name in link.run(_COLUMNS, [oids([row[0] for row in found])]).values():
        columns.setdefault(oid, {})[number] = name
    return [
        Relation(oid, schema, name, kind, persistence, secured, partition, rule, columns.get(oid, {}))
        for oid, schema, name, kind, persistence, secured, partition, rule in found
    ]
