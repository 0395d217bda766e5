"""SQL and predicates that callers send: rules, connections, evaluation, analysis."""
