"""SQL statements, transactions and schema changes of callers."""
