"""Names of the formats of rows and changes on the wire, and where each is served."""

ROWS, OBJECTS, PLAIN = "rows_json", "objects_json", "plain_json"
DEBEZIUM, CLOUDEVENTS, COCKROACH = "debezium_json", "cloudevents_json", "cockroach_wrapped_json"
CSV, ARROW = "csv", "arrow"

ENVELOPES = (DEBEZIUM, CLOUDEVENTS, COCKROACH)  # made of both images

# The first of each is the default.
CHANGE_FORMATS = (OBJECTS, PLAIN, *ENVELOPES)
INVALIDATION_FORMATS = (OBJECTS, PLAIN, CLOUDEVENTS)
SNAPSHOT_FORMATS = (PLAIN, OBJECTS)
STATEMENT_FORMATS = (ROWS, OBJECTS)
QUERY_FORMATS = (ROWS, OBJECTS, PLAIN)  # over RPC
ANSWER_FORMATS = (*QUERY_FORMATS, CSV, ARROW)  # over HTTP
UNSERVED_FORMATS = frozenset({"skeinpack_v1", "wasm_batch_v1"})  # SkeinDB has them
