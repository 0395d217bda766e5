"""The Spark pipeline: snapshot, then every change, exactly once, into a sink. A client of the server like any other."""
