"""SQL and predicates from callers: authorizer, evaluation, analysis."""
