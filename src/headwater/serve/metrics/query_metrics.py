"""Prometheus metrics of queries."""

from __future__ import annotations

import math
from collections.abc import Iterator

from headwater.model.work.answer_limits import MEMORY
from headwater.queries.queries import Queries

QUERY_METRICS: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> help, labels
    "headwater_queries_prepared": ("Prepared queries in memory.", ()),
    "headwater_answer_memory_bytes": ("Memory of query results in preparation.", ()),
    "headwater_query_requests_total": ("Query requests.", ()),
    "headwater_query_conditional_total": ("Query requests with an ETag.", ()),
    "headwater_query_not_modified_total": ("Query requests answered as not modified.", ()),
    "headwater_query_executed_total": ("Queries run.", ()),
    "headwater_query_shared_total": ("Query requests answered from a concurrent request's execution.", ()),
    "headwater_query_uncacheable_total": ("Query results without an ETag, because the query is volatile.", ()),
    "headwater_query_uncacheable_reasons_total": ("Query results without an ETag, by reason.", ("reason",)),
    "headwater_query_fallback_total": ("Queries that depend on whole tables or rows, by reason.", ("reason",)),
    "headwater_query_analysed_total": (
        "Analysed queries by the precision of their dependencies: row, column, table, or none.",
        ("precision",),
    ),
    "headwater_query_watched": ("Query instances whose last relevant change is tracked.", ("db",)),
    "headwater_query_routed_changes_total": ("Changes matched against query dependencies.", ("db",)),
    "headwater_query_routed_seconds_total": ("Time spent matching changes against query dependencies.", ("db",)),
    "headwater_query_guarded": ("Query instances with guards.", ("db",)),
    "headwater_query_guard_suppressed_total": (
        "Relevant changes that did not invalidate a query instance because of its guards.",
        ("db",),
    ),
    "headwater_query_guard_allowed_total": ("ETags that remained current only because of guards.", ("db",)),
    "headwater_query_compared_total": ("Stale query results compared with their replacement.", ()),
    "headwater_query_unchanged_total": ("Invalidations after which the result was unchanged.", ()),
    "headwater_etag_hit_rate": ("Share of received ETags that were current.", ()),
    "headwater_304_rate": ("Share of query requests answered as not modified.", ()),
    "headwater_avg_etag_compute_time": ("Average seconds to compute or check an ETag.", ()),
    "headwater_query_dependency_size": ("Average number of table references per query.", ()),
    "headwater_false_invalidation_ratio": ("Share of invalidations after which the result was unchanged.", ()),
}

Samples = list[tuple[tuple[str, ...], float]]


def asked(queries: Queries) -> Iterator[tuple[str, Samples]]:
    """Yield the name and the samples of each metric in QUERY_METRICS."""
    numbers, versions = queries.numbers, queries.versions()
    plain = {
        "headwater_queries_prepared": queries.kept,
        "headwater_answer_memory_bytes": MEMORY.used,
        "headwater_query_requests_total": numbers.asked,
        "headwater_query_conditional_total": numbers.conditional,
        "headwater_query_not_modified_total": numbers.not_modified,
        "headwater_query_executed_total": numbers.executed,
        "headwater_query_shared_total": numbers.shared,
        "headwater_query_uncacheable_total": numbers.uncacheable,
        "headwater_query_compared_total": numbers.compared,
        "headwater_query_unchanged_total": numbers.unchanged,
    }
    for name, number in plain.items():
        yield name, [((), float(number))]
    reasons = numbers.reasons
    yield "headwater_query_uncacheable_reasons_total", [((why,), float(n)) for why, n in reasons.uncacheable.items()]
    yield "headwater_query_fallback_total", [((why,), float(n)) for why, n in reasons.fallback.items()]
    yield "headwater_query_analysed_total", [((name,), float(n)) for name, n in numbers.analysed.items()]
    yield "headwater_query_watched", [((db,), float(each.watching)) for db, each in versions.items()]
    yield "headwater_query_routed_changes_total", [((db,), float(each.looked_at)) for db, each in versions.items()]
    yield "headwater_query_routed_seconds_total", [((db,), each.seconds) for db, each in versions.items()]
    yield "headwater_query_guarded", [((db,), float(len(each.guarded))) for db, each in versions.items()]
    suppressed = {db: float(each.guarded.suppressed) for db, each in versions.items()}
    yield "headwater_query_guard_suppressed_total", [((db,), number) for db, number in suppressed.items()]
    yield "headwater_query_guard_allowed_total", [((db,), float(each.allowed)) for db, each in versions.items()]
    analysed = sum(numbers.analysed.values())
    yield "headwater_etag_hit_rate", _share(numbers.not_modified, numbers.conditional)
    yield "headwater_304_rate", _share(numbers.not_modified, numbers.asked)
    yield "headwater_avg_etag_compute_time", _share(numbers.tag_seconds, numbers.tags)
    yield "headwater_query_dependency_size", _share(numbers.places, analysed)
    yield "headwater_false_invalidation_ratio", _share(numbers.unchanged, numbers.compared)


def _share(part: float, whole: float) -> Samples:
    return [((), part / whole if whole else math.nan)]
