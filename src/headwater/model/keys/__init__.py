"""Keys as bytes in key order, spans of them, and an index over spans."""
