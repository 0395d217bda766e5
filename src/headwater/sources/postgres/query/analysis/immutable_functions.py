"""Functions with equal results for equal arguments: PostgreSQL's immutable ones, and some that depend on settings.

The settings are those that every transaction of ours sets (`types.SETTINGS`), and some that the epoch contains.
Functions of users are not examined: a function declared IMMUTABLE may still read tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

FIRST_OWN = 16384  # objects with lower oids are PostgreSQL's own
# Extensions whose immutable functions depend only on their arguments. Not isn: its weak mode is a state of the session.
TRUSTED = frozenset({"citext", "cube", "hstore", "intarray", "ltree", "pgcrypto", "seg", "vector"})
# SQL: a function of pg_proc `p` sets the weak mode of isn; it is declared IMMUTABLE before PostgreSQL 18.
SETS_WEAK_MODE = "p.prosrc = 'accept_weak_input'"

_BY_TIME_ZONE = (
    "date time timestamp timestamptz timetz date_part date_trunc extract date_add date_subtract in_range "
    "timestamptz_pl_interval timestamptz_mi_interval interval_pl_timestamptz generate_series make_timestamptz "
    + " ".join(
        f"date_{op}_timestamptz timestamp_{op}_timestamptz timestamptz_{op}_date timestamptz_{op}_timestamp"
        for op in ("eq", "ne", "lt", "le", "gt", "ge", "cmp")
    )
)
_BY_TEXT = (
    "to_char concat concat_ws format array_to_string quote_literal quote_nullable anytextcat textanycat "
    "date_out time_out timetz_out timestamp_out timestamptz_out interval_out enum_out array_out record_out range_out "
    "multirange_out cash_out enum_first enum_last enum_range"
)
_JSON = "to_json to_jsonb row_to_json array_to_json json_build_array json_build_object jsonb_build_array "
_JSON += "jsonb_build_object json_agg json_agg_strict jsonb_agg jsonb_agg_strict json_object_agg jsonb_object_agg "
_JSON += "json_object_agg_strict json_object_agg_unique json_object_agg_unique_strict"
JSON_MAKERS = frozenset(_JSON.split())
_STEADY = frozenset(_BY_TIME_ZONE.split()) | frozenset(_BY_TEXT.split()) | JSON_MAKERS
# Text is converted to these types without the clock, though PostgreSQL does not declare that immutable.
STEADY_INPUTS = frozenset({"interval_in", "enum_in"})

# Other built-in functions that read no stored data: clocks, random numbers, and functions of settings alone.
_PLAIN = """
now statement_timestamp transaction_timestamp clock_timestamp timeofday random random_normal gen_random_uuid uuidv4
uuidv7 age overlaps pg_typeof to_timestamp to_date to_number json_populate_record json_populate_recordset
jsonb_populate_record jsonb_populate_recordset json_to_record json_to_recordset jsonb_to_record jsonb_to_recordset
jsonb_path_exists_tz jsonb_path_match_tz jsonb_path_query_tz jsonb_path_query_array_tz jsonb_path_query_first_tz
"""
HARMLESS = frozenset(_PLAIN.split())


# Declared IMMUTABLE, but they look up an object of the catalogue by its number, and their errors name it.
CATALOG_READERS = frozenset({"satisfies_hash_partition", "ts_parse", "ts_token_type", "pg_indexam_progress_phasename"})


class Function(msgspec.Struct, frozen=True):
    """The facts about a function in the catalogue."""

    oid: int
    name: str  # as a caller writes it
    volatility: str
    language: str
    extension: str


def reasons(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the reasons why an answer of these functions may change though no row changed."""
    for each in functions:
        if each.oid >= FIRST_OWN and not is_trusted(each):
            yield f"{each.name}() is not PostgreSQL's own: its dependencies are not known"
        elif each.volatility != "i" and (each.oid >= FIRST_OWN or each.name not in _STEADY):
            yield f"{each.name}() may answer differently each time"


def outside(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the names of functions that may read outside the statement's tables: query_to_xml(), those of users."""
    for each in functions:
        is_catalog_reader = each.oid < FIRST_OWN and each.name in CATALOG_READERS
        if is_catalog_reader or (any(reasons([each])) and not (each.oid < FIRST_OWN and each.name in HARMLESS)):
            yield f"{each.name}()"


def is_trusted(function: Function) -> bool:
    """Return whether the declared volatility of a function that is not built in is trusted."""
    return function.extension in TRUSTED and function.language in ("c", "internal")
