"""SQL and predicates that callers send: authorizer, evaluation, analysis."""
