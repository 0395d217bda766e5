"""The numbers of queries for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator

from headwater.model.answer_limits import MEMORY
from headwater.queries.queries import Queries

QUERY_METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name -> kind, help, labels
    "headwater_queries_prepared": ("gauge", "Prepared queries that are kept.", ()),
    "headwater_answer_memory_bytes": ("gauge", "Memory of the answers being made.", ()),
    "headwater_query_requests_total": ("counter", "Answers asked for.", ()),
    "headwater_query_conditional_total": ("counter", "Of those with a tag of an answer they had.", ()),
    "headwater_query_not_modified_total": ("counter", "Of those whose answer was current.", ()),
    "headwater_query_executed_total": ("counter", "Queries run.", ()),
    "headwater_query_shared_total": ("counter", "Answers that came of another request's run.", ()),
    "headwater_query_uncacheable_total": ("counter", "Answers without a tag: of volatile queries.", ()),
    "headwater_query_uncacheable_reasons_total": ("counter", "The same, by why.", ("reason",)),
    "headwater_query_fallback_total": ("counter", "Queries that depend on whole tables or rows, by why.", ("reason",)),
    "headwater_query_analysed_total": (
        "counter",
        "Queries understood, and down to what: row, column, table, or none.",
        ("precision",),
    ),
    "headwater_query_watched": ("gauge", "Instances whose last relevant change is tracked.", ("db",)),
    "headwater_query_routed_changes_total": ("counter", "Changes looked at for the sake of queries.", ("db",)),
    "headwater_query_routed_seconds_total": ("counter", "Time that took.", ("db",)),
    "headwater_query_guarded": ("gauge", "Instances that hold guards.", ("db",)),
    "headwater_query_guard_suppressed_total": (
        "counter",
        "Changes that matter to a watched instance, and by its guards left its answer as it was.",
        ("db",),
    ),
    "headwater_query_guard_allowed_total": ("counter", "Tags that were current only by guards.", ("db",)),
    "headwater_query_compared_total": ("counter", "Stale answers that were compared with the next.", ()),
    "headwater_query_unchanged_total": ("counter", "Of those were no other: invalidated for nothing.", ()),
    "headwater_etag_hit_rate": ("gauge", "Share of tags sent that were current.", ()),
    "headwater_304_rate": ("gauge", "Share of requests answered by `not modified`.", ()),
    "headwater_avg_etag_compute_time": ("gauge", "Seconds to make or look at a tag, on average.", ()),
    "headwater_query_dependency_size": ("gauge", "Places of tables in a query, on average.", ()),
    "headwater_false_invalidation_ratio": ("gauge", "Share of stale answers that were the same all the same.", ()),
}

Samples = list[tuple[tuple[str, ...], float]]


def asked(queries: Queries) -> Iterator[tuple[str, Samples]]:
    """Name and samples of each."""
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
