"""SQLite functions whose result depends only on their arguments. Any other function makes a query uncacheable.

Date functions are excluded: a value in the data may be 'now' or request local time.
"""

from __future__ import annotations

_SCALAR = """
abs char coalesce concat concat_ws format glob hex if ifnull iif instr length like likelihood likely lower ltrim max min
nullif octet_length printf quote replace round rtrim sign soundex substr substring trim typeof unhex unicode unistr
unistr_quote unlikely upper subtype
acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power
radians sin sinh sqrt tan tanh trunc
-> ->> json json_array json_array_insert json_array_length json_extract json_insert json_object json_patch json_pretty
json_quote json_remove json_replace json_set json_type json_valid json_error_position
jsonb jsonb_array jsonb_array_insert jsonb_extract jsonb_insert jsonb_object jsonb_patch jsonb_remove jsonb_replace
jsonb_set
"""
_AGGREGATE = "avg count group_concat max min string_agg sum total median percentile percentile_cont percentile_disc"
_JSON_AGGREGATE = "json_group_array json_group_object jsonb_group_array jsonb_group_object"
_WINDOW = "row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value"

DETERMINISTIC = frozenset(f"{_SCALAR} {_AGGREGATE} {_JSON_AGGREGATE} {_WINDOW}".split())

# Other functions that read no stored data. Callers restricted to certain tables may use only these two lists.
_PLAIN = """
date time datetime julianday strftime unixepoch timediff current_date current_time current_timestamp random randomblob
zeroblob changes total_changes last_insert_rowid sqlite_version sqlite_source_id
"""
HARMLESS = DETERMINISTIC | frozenset(_PLAIN.split())
