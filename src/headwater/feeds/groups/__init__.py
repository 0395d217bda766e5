"""Groups of streams that share a view of the log: the view, the group, and the batches published to groups."""
