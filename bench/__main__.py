"""`python -m bench [NAME ...]`: run all benchmarks, or the named ones, one after another, on an idle machine."""

import sys

from bench import (
    asking,
    commit,
    drain,
    fanout,
    grpc_stream,
    lake,
    large_answers,
    latency,
    log,
    microbatch,
    not_modified,
    pg_drain,
    pg_latency,
    pg_snapshot,
    pg_transaction,
    pull,
    quiet_tables,
    restart,
    routing,
    spark_log,
    stalled,
    subscriptions,
    writes,
)

ALL = {
    "commit": commit.main,
    "writes": writes.main,
    "log": log.main,
    "drain": drain.main,
    "restart": restart.main,
    "fanout": fanout.main,
    "grpc_stream": grpc_stream.main,
    "latency": latency.main,
    "stalled": stalled.main,
    "large_answers": large_answers.main,
    "subscriptions": subscriptions.main,
    "pull": pull.main,
    "pg_snapshot": pg_snapshot.main,
    "spark_log": spark_log.main,
    "lake": lake.main,
    "microbatch": microbatch.main,
    "quiet_tables": quiet_tables.main,
    "routing": routing.main,
    "not_modified": not_modified.main,
    "asking": asking.main,
    "pg_drain": pg_drain.main,
    "pg_latency": pg_latency.main,
    "pg_transaction": pg_transaction.main,
}

if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(ALL)
    if unknown:
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(ALL)}")
    for name in sys.argv[1:] or ALL:
        ALL[name]()
