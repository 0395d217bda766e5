"""The contract on PostgreSQL: the same tests as on SQLite, with a PostgreSQL database as `main`.

Left out is test_repeated_requests: a 304 is remembered without a look at the database on SQLite only. `make test` runs
the modules of EVERY_TIME, `make soak` all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from _pytest.fixtures import FixtureFunctionDefinition
from tests.conformance import (
    test_arrow_changes,
    test_backpressure_events,
    test_checkpoints,
    test_client_disconnects,
    test_client_frames,
    test_filter_transitions,
    test_gateway,
    test_pull,
    test_queries_http,
    test_query_feeds,
    test_query_headers,
    test_row_causality,
    test_rows_http,
    test_shared_executions,
    test_skeindb_defects,
    test_skeindb_suite,
    test_snapshot_feeds,
    test_snapshot_url,
    test_stream_frames,
    test_subscription_options,
)
from tests.conformance.live_postgres_server import PostgresLive
from tests.conformance.live_server import Live

SAME = (
    *(test_arrow_changes, test_checkpoints, test_client_frames, test_client_disconnects, test_filter_transitions),
    *(test_gateway, test_backpressure_events, test_pull, test_queries_http, test_query_feeds, test_query_headers),
    *(
        test_shared_executions,
        test_row_causality,
        test_rows_http,
        test_skeindb_defects,
        test_skeindb_suite,
        test_snapshot_feeds,
    ),
    *(test_snapshot_url, test_stream_frames, test_subscription_options),
)
WRITTEN = "the test is written in SQLite's SQL"
PRECISION = "on PostgreSQL conditions inside set operations, joins and rows of several tables count as any row"
ONLY_SQLITE = {  # by module and name: why
    **dict.fromkeys(
        (
            "client_disconnects_stalled_stream_is_closed_when_its_client_disconnects",
            "client_disconnects_stalled_reader_does_not_delay_another_reader",
            "gateway_failing_predicate_ends_only_its_own_subscription",
            "gateway_value_with_an_expired_ttl_is_not_found",
            "gateway_kv_messages_put_get_and_delete_a_key",
            "gateway_sql_reads_and_writes_with_parameters",
            "backpressure_events_subscription_without_acks_is_pressured_by_the_byte_limit",
            "pull_reader_resumes_after_its_last_key",
            "queries_http_named_arguments_are_accepted_as_plain_values_or_typed_literals",
            "queries_http_concurrent_requests_for_the_same_query_share_executions",
            "queries_http_volatile_query_has_no_tag",
            "query_feeds_query_over_an_uncaptured_table_is_invalidated_by_every_change",
            "query_feeds_query_that_becomes_volatile_is_invalidated_by_every_change_of_its_tables",
            "query_feeds_every_changed_answer_is_preceded_by_an_invalidation",
            "query_feeds_invalidation_contains_the_changed_key_at_any_column_position",
            "query_feeds_view_redefined_while_the_server_is_down_is_followed_after_the_start",
            "query_headers_headers_of_a_query_over_60_tables_stay_small_and_keep_the_causality_floor",
            "rows_http_examples_of_the_rows_page_are_answered_as_shown",
            "rows_http_row_tag_is_valid_after_a_restart_until_the_row_changes",
            "skeindb_defects_cursor_ahead_of_a_recreated_log_requires_a_resnapshot",
            "snapshot_feeds_table_replaced_during_its_snapshot_is_delivered_with_its_new_rows",
            "snapshot_feeds_polled_snapshot_plus_changes_equals_the_table",
            "snapshot_feeds_streamed_snapshot_plus_changes_equals_the_table",
            "snapshot_url_historical_read_stops_after_its_reader_disconnects",
            "subscription_options_huge_transaction_is_delivered_in_parts_or_refused_with_a_working_pull_url",
            "subscription_options_shards_deliver_every_key_to_exactly_one_shard",
            "subscription_options_pull_url_of_a_huge_transaction_applies_the_options_of_the_subscription",
        ),
        WRITTEN,
    ),
    **dict.fromkeys(
        (
            "query_feeds_feed_started_at_a_tag_delivers_only_later_invalidations",
            "query_feeds_key_filter_that_fits_one_of_two_tables_passes_only_its_changes",
            "query_feeds_change_in_either_branch_of_a_set_operation_invalidates",
        ),
        PRECISION,
    ),
    **dict.fromkeys(
        (
            "gateway_schema_change_event_contains_the_ddl",
            "query_feeds_schema_change_of_a_queried_table_is_an_invalidation",
            "skeindb_defects_schema_change_is_delivered_unless_ops_exclude_it",
            "stream_frames_schema_change_is_delivered_as_its_own_event",
        ),
        "on PostgreSQL a change of the schema has a text that is made of both shapes, and comes with a row or a look",
    ),
    "queries_http_an_answer_that_has_no_place_yet_has_its_patch_in_a_moment": "it looks into SQLite's source",
}
EVERY_TIME = ("test_filter_transitions_", "test_skeindb_suite_", "test_rows_http_")
for module in SAME:
    prefix = module.__name__.rpartition("test_")[2]
    for name, found in vars(module).items():
        if name.startswith("test_") and (known := f"{prefix}_{name.removeprefix('test_')}") not in ONLY_SQLITE:
            globals()[f"test_{known}"] = found
        elif isinstance(found, FixtureFunctionDefinition):
            assert globals().setdefault(name, found) is found, f"two modules have a fixture {name}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = PostgresLive(tmp_path_factory.mktemp("shared"))
    yield live
    live.remove()


@pytest.fixture
def make_live() -> Callable[..., Live]:
    return PostgresLive


def test_every_test_excluded_on_postgres_exists() -> None:
    names = {
        f"{module.__name__.rpartition('test_')[2]}_{name.removeprefix('test_')}"
        for module in SAME
        for name in vars(module)
        if name.startswith("test_")
    }
    assert set(ONLY_SQLITE) <= names
