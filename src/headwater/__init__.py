"""Headwater makes a SQL database live.

    writers                                             readers
       |                                                   ^
       v                                                   |
   +--------+   capture   +-----+ ---- feeds ------------> subscribers
   | source | ----------> | log | ---- queries ----------> GET + ETag, rows, transactions
   +--------+             +-----+ ---- ranges (pulls) ---> Spark pipeline

The log is the only meeting point: right of it, code knows a source only as `sources/source.py`.
Imports go downwards only:
    errors < model, config < log, sources < capture < feeds, queries, ranges < serve < app < cli
"""

__version__ = "0.1.0"
