"""The catalogue's facts about the functions, types and tables of a statement, and why its answers are not cacheable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.query.analysis.immutable_functions import (
    FIRST_OWN,
    JSON_MAKERS,
    STEADY_INPUTS,
    TRUSTED,
    Function,
    outside,
    reasons,
)
from headwater.sources.postgres.query.analysis.parse_tree_source import Relation, StatementFacts, oids
from headwater.sources.postgres.query.analysis.result_order import CatalogFacts
from headwater.sources.postgres.query.analysis.row_conditions import Operator
from headwater.sources.postgres.query.analysis.tree_reads import WHOLE_ROW
from headwater.sources.postgres.schema.lock_free_catalog import published_sql
from headwater.sources.postgres.schema.relations import table_name

_EXTENSION = """coalesce((SELECT x.extname FROM pg_depend d JOIN pg_extension x ON x.oid = d.refobjid
  WHERE d.classid = '{catalogue}'::regclass AND d.objid = {oid} AND d.deptype = 'e'
    AND d.refclassid = 'pg_extension'::regclass), '')"""
_FUNCTIONS = f"""
SELECT p.oid, CASE WHEN n.nspname = 'pg_catalog' THEN p.proname::text ELSE n.nspname || '.' || p.proname END,
       p.provolatile::text, l.lanname, {_EXTENSION.format(catalogue="pg_proc", oid="p.oid")}
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_language l ON l.oid = p.prolang
WHERE p.oid = ANY ($1::oid[]) OR p.oid IN (SELECT oprcode FROM pg_operator WHERE oid = ANY ($2::oid[]))
ORDER BY 2
"""
# Every used type, and the types inside it: elements, bases, attributes, bounds.
_TYPES = f"""
WITH RECURSIVE used (oid) AS (
  SELECT unnest($1::oid[])
  UNION SELECT inner_.oid FROM used u JOIN pg_type t ON t.oid = u.oid LEFT JOIN pg_range r ON r.rngtypid = t.oid
  OR r.rngmultitypid = t.oid CROSS JOIN LATERAL (
    VALUES (t.typelem), (t.typbasetype), (r.rngsubtype)
    UNION ALL SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
      AND NOT a.attisdropped) inner_ (oid)
  WHERE inner_.oid <> 0
)
SELECT t.oid, t.typname, t.typtype::text, t.typcategory::text, coalesce(r.rngcanonical::oid, 0),
       {_EXTENSION.format(catalogue="pg_type", oid="t.oid")}
FROM used u JOIN pg_type t ON t.oid = u.oid LEFT JOIN pg_range r ON r.rngtypid = t.oid ORDER BY 2
"""
_INPUTS = """
SELECT t.typname, p.proname, p.provolatile::text FROM pg_type t JOIN pg_proc p ON p.oid = t.typinput
WHERE t.oid = ANY ($1::oid[]) ORDER BY 1
"""
_OUTPUTS = """
SELECT p.oid, p.proname, p.provolatile::text, 'internal', '' FROM pg_type t JOIN pg_proc p ON p.oid = t.typoutput
WHERE t.oid = ANY ($1::oid[]) AND t.oid < 16384 ORDER BY 2
"""
# An index of an extension's access method (HNSW and IVFFlat of pgvector) may order rows approximately. PostgreSQL
# uses it for the ordering operators of its operator classes, also with the operands exchanged.
_APPROXIMATE = f"""
SELECT DISTINCT o.oprname FROM pg_operator o WHERE o.oid = ANY ($1::oid[]) AND (
  EXISTS (SELECT FROM pg_amop a WHERE a.amopopr IN (o.oid, o.oprcom) AND a.amoppurpose = 'o' AND a.amopmethod >= 16384)
  OR o.oprname IN ('<->', '<=>', '<#>', '<+>', '<~>', '<%>')
    AND {_EXTENSION.format(catalogue="pg_operator", oid="o.oid")} = 'vector')
ORDER BY 1
"""
_JSON_CASTS = "SELECT 1 FROM pg_cast WHERE oid >= 16384 AND casttarget IN (114, 3802) LIMIT 1"
_PUBLICATION = """
SELECT p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate, p.pubviaroot
FROM pg_publication p WHERE p.pubname = $1
"""
# Row filters and column lists exist since PostgreSQL 15.
_PARTLY = """
SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = $1 AND (to_jsonb(r) ->> 'prqual' IS NOT NULL OR to_jsonb(r) ->> 'prattrs' IS NOT NULL)
"""
_ROW_TYPES = """
SELECT n.nspname, c.relname FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem
JOIN pg_class c ON c.oid IN (t.typrelid, e.typrelid) AND c.relkind <> 'c' JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.oid = ANY ($1::oid[])
"""
# Types of users that no column of the relations has: enums and domains reveal facts about the tables that use them.
_FOREIGN_TYPES = """
WITH RECURSIVE own (oid) AS (
  SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = ANY ($2::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
  UNION SELECT inner_.oid FROM own o JOIN pg_type t ON t.oid = o.oid LEFT JOIN pg_range r ON r.rngtypid = t.oid
  CROSS JOIN LATERAL (
    VALUES (t.typelem), (t.typarray), (t.typbasetype), (r.rngsubtype)
    UNION ALL SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
      AND NOT a.attisdropped) inner_ (oid)
  WHERE inner_.oid <> 0
)
SELECT t.typname FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem
WHERE t.oid = ANY ($1::oid[]) AND t.oid >= 16384 AND t.oid NOT IN (SELECT oid FROM own)
  AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid IN (t.typrelid, e.typrelid) AND c.relkind <> 'c')
  AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_type'::regclass AND d.deptype = 'e'
    AND d.objid IN (t.oid, t.typelem))
"""
_KINDS = {"m": "a materialised view", "f": "a foreign table", "S": "a sequence", "t": "a TOAST table", "c": "a type"}


def volatility(link: Link, facts: StatementFacts) -> tuple[str, ...]:
    """Return the reasons why an answer may change though its tables did not."""
    used = facts.used
    found = set(used.reasons)
    functions = _functions(link, facts)
    found.update(reasons(functions))
    found.update(_types(link, facts))
    found.update(_conversions(link, facts))
    for (name,) in link.run(_APPROXIMATE, [oids(used.operators)]).values():
        found.add(f"an approximate index may choose the rows: operator {name}")
    if any(each.name in JSON_MAKERS for each in functions) and link.run(_JSON_CASTS).rows:
        found.add("a cast to JSON is not PostgreSQL's own: its dependencies are not known")
    for oid, columns in used.columns.items():
        if min(columns, default=WHOLE_ROW) < WHOLE_ROW:
            name = facts.relations[oid].called if oid in facts.relations else str(oid)
            found.add(f"system columns of {name!r} change without a change of the row")
    return tuple(sorted(found))


def beyond(link: Link, facts: StatementFacts) -> tuple[str, ...]:
    """Return the objects read besides the user's tables: catalogues, also by types that name their objects, anything
    that functions read, and views and partitioned tables without a table in them.
    """
    found = _without_table(facts) | {
        f"{each.schema}.{each.name}" for each in read_relations(facts) if each.oid < FIRST_OWN
    }
    # A row type reveals that its relation exists, and its columns.
    found.update(table_name(*row) for row in link.run(_ROW_TYPES, [oids(facts.used.types)]).values())
    relations = oids([each.oid for each in read_relations(facts)])
    foreign = link.run(_FOREIGN_TYPES, [oids(facts.used.types), relations]).values()
    found.update(f"type {name}" for (name,) in foreign)
    found.update(outside(_functions(link, facts)))
    found.update(_types(link, facts))
    return tuple(sorted(found))


def _without_table(facts: StatementFacts) -> set[str]:
    """Return the named views and partitioned tables that read no table: no scope on tables covers their contents."""
    reading = {oid for oid, each in facts.relations.items() if each.kind not in "vp"}
    reading |= {root for root, children in facts.children.items() if reading.intersection(children)}
    while new := {view for view, named in facts.used.by_view.items() if view not in reading and named & reading}:
        reading |= new
    return {facts.relations[oid].called for oid in facts.used.columns if oid not in reading}


def _functions(link: Link, facts: StatementFacts) -> list[Function]:
    rows = link.run(_FUNCTIONS, [oids(facts.used.functions), oids(facts.used.operators)]).values()
    return [Function(*row) for row in rows]


def _types(link: Link, facts: StatementFacts) -> Iterator[str]:
    for oid, name, kind, category, canonical, extension in link.run(_TYPES, [oids(facts.used.types)]).values():
        if oid < FIRST_OWN:
            if name.lstrip("_").startswith("reg") or name.lstrip("_") == "aclitem":
                yield f"type {name} names things of the catalogue, whose changes are not seen"
        elif not (_is_made(kind, category, canonical) or extension in TRUSTED):
            yield f"type {name} is not PostgreSQL's own: how it is compared and shown is not known"


def _is_made(kind: str, category: str, canonical: int) -> bool:
    """Return whether a type is made only of others: an enum, a domain, a composite, an array, a plain range."""
    return kind in "edc" or (kind == "b" and category == "A") or (kind in "rm" and not canonical)


def _conversions(link: Link, facts: StatementFacts) -> Iterator[str]:
    """Yield the reasons from conversions by way of text, which may be `now`."""
    into = {target for _, target in facts.used.conversions}
    for name, function, volatility_ in link.run(_INPUTS, [oids(into)]).values():
        if volatility_ != "i" and function not in STEADY_INPUTS:
            yield f"text that becomes a {name} may mean the current time"
    outputs = {source for source, _ in facts.used.conversions}
    yield from reasons([Function(*row) for row in link.run(_OUTPUTS, [oids(outputs)]).values()])


def unseen(link: Link, facts: StatementFacts, publication: str) -> tuple[str, ...]:
    """Return the reasons why some changes of the read tables are not captured; () if all are."""
    name = publication.encode()
    told = link.run(_PUBLICATION, [name]).values()
    whole, by_root = told[0] if told else (False, False)
    tables = [each for each in read_relations(facts) if each.kind != "v"]
    ask = published_sql(link.version, "$1") + "AND c.oid = ANY ($2::oid[])"
    published = {oid for (oid,) in link.run(ask, [name, oids([each.oid for each in tables])]).values()}
    partly = {oid for (oid,) in link.run(_PARTLY, [name]).values()}
    found = {reason for each in tables if (reason := _unseen(each, published, partly, by_root))}
    if tables and not whole:
        remedy = f"ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate')"
        found.add(f"the publication leaves out some changes: {remedy}" if told else "there is no publication")
    for each in read_relations(facts):
        if each.is_secured:
            found.add(f"{each.called!r} has row security, whose policies may read anything")
    return tuple(sorted(found))


def _unseen(each: Relation, published: set[int], partly: set[int], by_root: bool) -> str:
    if each.oid < FIRST_OWN:
        return f"{each.schema}.{each.name} is PostgreSQL's own catalogue: its changes are not seen"
    if each.kind in _KINDS:
        return f"{each.called!r} is {_KINDS[each.kind]}: its changes are not seen"
    if each.persistence != "p":
        word = "temporary" if each.persistence == "t" else "unlogged"
        return f"{each.called!r} is {word}: its changes are not seen"
    if by_root and (each.is_partition or each.kind == "p"):
        return f"{each.called!r} is published by its root: set publish_via_partition_root = false"
    if each.kind == "p":
        return ""  # its rows are in its partitions
    if each.oid not in published:
        return f"table {each.called!r} is not published: name it in postgres.tables"
    if each.oid in partly:
        return f"table {each.called!r} is published in part only: drop its row filter or column list"
    return ""


# Comparisons that never fail: of a type with itself, or of integers.
_COMPARED = "16,17,20,21,23,25,1042,1082,1083,1114,1184,1186,1266,1700,700,701,2950"
_OPERATORS = f"""
SELECT oid, oprname, oprleft, oprright FROM pg_operator
WHERE oid = ANY ($1::oid[]) AND oid < 16384 AND oprname IN ('=', '<>', '<', '<=', '>', '>=')
  AND oprleft IN ({_COMPARED}) AND (oprleft = oprright OR oprleft IN (20, 21, 23) AND oprright IN (20, 21, 23))
"""
_KEYS = """
SELECT i.indrelid, k.number::int FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
WHERE i.indrelid = ANY ($1::oid[]) AND i.indisprimary AND i.indisvalid AND k.place <= i.indnkeyatts
  AND (c.relkind = 'p' OR NOT EXISTS (SELECT 1 FROM pg_inherits h WHERE h.inhparent = c.oid))
ORDER BY 1, k.place
"""
_NAMES = "SELECT oid, proname FROM pg_proc WHERE oid = ANY ($1::oid[])"
_ODD = "SELECT oid FROM pg_collation WHERE NOT collisdeterministic"
_WORDS = {"=": "eq", "<>": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


def operators(link: Link, facts: StatementFacts) -> dict[int, Operator]:
    """Return the built-in comparisons of a statement by oid."""
    found = link.run(_OPERATORS, [oids(facts.used.operators)]).values()
    return {oid: Operator(_WORDS[name], left, right) for oid, name, left, right in found}


def known_to(link: Link, facts: StatementFacts, compared: Mapping[int, Operator]) -> CatalogFacts:
    """Return the catalogue's facts about a statement that `result_order` needs."""
    keys: dict[int, tuple[int, ...]] = {}
    for oid, number in link.run(_KEYS, [oids(facts.used.columns)]).values():
        keys[oid] = (*keys.get(oid, ()), number)
    functions = dict(link.run(_NAMES, [oids(facts.used.functions)]).values())
    odd = frozenset(oid for (oid,) in link.run(_ODD).values())
    return CatalogFacts(keys, functions, frozenset(oid for oid, each in compared.items() if each.op == "eq"), odd)


def read_relations(facts: StatementFacts) -> list[Relation]:
    """Return everything that is read: named relations, views and the relations below them, and children."""
    named = set(facts.used.columns)
    below = {oid for root, children in facts.children.items() if root in named for oid in children}
    return [each for oid, each in sorted(facts.relations.items()) if oid in named | below]
