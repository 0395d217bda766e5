"""Side-by-side benchmarks, one file each; they print ratios, because machines differ."""
