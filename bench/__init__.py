"""Side-by-side benchmarks, one file each; ratios come out, because machines differ."""
