"""Statements that mention a table in every form: an answer must not show whether the table exists."""

FORMS: tuple[str, ...] = (
    "SELECT EXISTS (SELECT 1 FROM {})",
    "SELECT NOT EXISTS (SELECT * FROM {})",
    "SELECT EXISTS (SELECT 1 FROM {} WHERE 1 = 0)",
    "SELECT count(*) FROM {}",
    "SELECT 1 FROM {}",
    "SELECT 1 FROM {} LIMIT 0",
    "SELECT 1 WHERE 1 IN (SELECT 1 FROM {})",
    "SELECT (SELECT 1 FROM {} LIMIT 1)",
    "SELECT CASE WHEN 1 = 0 THEN (SELECT 1 FROM {}) END",
    "WITH a AS (SELECT 1 FROM {}) SELECT 1 FROM {OWN}",
    "SELECT 1 FROM {OWN} WHERE 1 = 0 AND EXISTS (SELECT 1 FROM {})",
    "SELECT 1 FROM {OWN} LEFT JOIN {} ON 1 = 0",
    "SELECT 1 FROM {OWN}, {} WHERE 1 = 0",
    "SELECT 1 FROM (SELECT 1 FROM {}) AS x",
    "SELECT 1 FROM {OWN} UNION SELECT 1 FROM {}",
    "VALUES (EXISTS (SELECT 1 FROM {}))",
    "SELECT 1 FROM {OWN} RIGHT JOIN {OWN} AS x USING (k), {}",
)
# The same with the name as a name of WITH: most of these are answered.
WITH_FORMS: tuple[str, ...] = (
    "WITH {} AS (SELECT 1 AS k) SELECT 1 FROM {}",
    "WITH {} AS (SELECT 1 AS k) SELECT k FROM {}",
    "WITH {} AS (SELECT 1 AS k) SELECT 1 FROM {}, {OWN} AS a RIGHT JOIN {OWN} AS b USING (k)",
    "WITH RECURSIVE {}(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM {} WHERE n < 3) SELECT count(*) FROM {}",
)


def mentioning(form: str, table: str, own: str) -> str:
    """Return the statement of a form about `table`; `own` is a table that the caller may read."""
    return form.replace("{OWN}", own).replace("{}", table)
