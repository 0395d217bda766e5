"""Changes and rows made ready for sinks."""
