"""Values: no I/O, no clock, no threads. Everything else in Headwater is written in these words."""
