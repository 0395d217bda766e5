"""`python -m bench`: every benchmark, one after another. Nothing else should run beside them."""

from bench import commit, drain, log, restart, writes

if __name__ == "__main__":
    commit.main()
    writes.main()
    log.main()
    drain.main()
    restart.main()
