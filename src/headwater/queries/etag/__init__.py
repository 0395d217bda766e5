"""ETags of rows and of query answers, causality tokens and preconditions."""
