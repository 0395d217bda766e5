"""The contract on PostgreSQL: the same tests as on SQLite, with a PostgreSQL as the database `main`.

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
            "client_disconnects_a_client_that_left_without_reading_is_noticed",
            "client_disconnects_a_reader_that_does_not_read_holds_nobody_up",
            "gateway_a_predicate_that_fails_ends_its_subscription_alone",
            "gateway_a_value_may_have_an_end",
            "gateway_keys_are_put_got_and_deleted",
            "gateway_sql_reads_and_writes_with_parameters",
            "backpressure_events_limit_by_bytes_presses_who_does_not_ack",
            "pull_a_reader_goes_on_behind_the_last_key_it_has",
            "queries_http_arguments_by_name_plain_or_as_lits",
            "queries_http_the_same_question_asked_by_many_is_answered_by_few_runs",
            "queries_http_what_may_change_by_itself_has_no_tag",
            "query_feeds_a_query_of_what_is_not_captured_is_told_every_change",
            "query_feeds_a_query_whose_answer_can_be_kept_no_more_is_told_every_change_of_its_tables",
            "query_feeds_an_answer_that_differs_was_told",
            "query_feeds_keys_are_told_wherever_they_stand_in_the_row",
            "query_feeds_view_defined_anew_while_the_server_was_down_is_followed_after_it",
            "query_headers_headers_stay_small_for_many_tables_and_the_floor_still_holds",
            "rows_http_the_examples_of_the_page_are_answered_as_shown",
            "rows_http_tags_outlive_a_restart",
            "skeindb_defects_a_cursor_ahead_of_a_log_that_began_at_zero_again_is_told_so",
            "snapshot_feeds_a_table_that_is_replaced_while_its_rows_are_read",
            "snapshot_feeds_polled_rows_and_then_changes_fold_to_the_table",
            "snapshot_feeds_streamed_rows_and_then_changes_fold_to_the_table",
            "snapshot_url_reading_back_stops_soon_after_the_reader_left",
            "subscription_options_a_huge_transaction_comes_in_parts_or_is_refused_with_a_url_that_works",
            "subscription_options_shares_are_a_partition",
            "subscription_options_the_url_of_a_huge_transaction_shows_it_as_the_subscriber_asked",
        ),
        WRITTEN,
    ),
    **dict.fromkeys(
        (
            "query_feeds_a_feed_goes_on_exactly_where_an_answer_stood",
            "query_feeds_a_filter_may_fit_one_of_several_tables",
            "query_feeds_change_in_either_branch_of_a_set_operation_invalidates",
        ),
        PRECISION,
    ),
    **dict.fromkeys(
        (
            "gateway_a_schema_change_carries_the_ddl",
            "query_feeds_a_change_of_the_schema_is_an_invalidation",
            "skeindb_defects_ddl_is_delivered_unless_ops_leave_it_out",
            "stream_frames_a_change_of_the_schema_is_an_event_of_its_own",
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


def test_what_is_left_out_exists() -> None:
    names = {
        f"{module.__name__.rpartition('test_')[2]}_{name.removeprefix('test_')}"
        for module in SAME
        for name in vars(module)
        if name.startswith("test_")
    }
    assert set(ONLY_SQLITE) <= names
