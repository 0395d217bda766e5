# The one door: `make demo` shows it, `make test` proves it. Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(wildcard src/headwater/*/*_compiled.pyx src/headwater/*/*/*_compiled.pyx)
PYTEST := $(BIN)/python -m pytest
BROWSER := chromium chromium-driver
WORKERS := 2 --dist worksteal
SERVICES := mariadb-server nginx varnish postgresql

.PHONY: help setup browser services jars protos sochdb demo check lint types unit test soak bench fmt clean

help:
	@echo "make demo    set up, then show Headwater working on an embedded database"
	@echo "make test    set up, then run every test"
	@echo "make check   lint, types and the fast tests (under two minutes)"
	@echo "make soak    long random runs: SEEDS=20 by default"
	@echo "make bench   side-by-side benchmarks; ratios go to bench/RESULTS.md by hand"

setup: $(STAMP)

$(STAMP): pyproject.toml hatch_build.py $(COMPILED)
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: install python3 and python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; PYTHON=/path/to/python3.11 make …"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	@touch $(STAMP)

# Only the tests want a browser. A machine that is not ours to change is told what is missing, and they skip.
browser:
	@found=; for name in chromium chromium-browser google-chrome; do command -v $$name && found=1 && break; done >/dev/null; \
	if [ -n "$$found" ] && command -v chromedriver >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(BROWSER) for the browser tests"; \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(BROWSER); } >/dev/null && exit 0; \
	fi; \
	echo "The browser tests need $(BROWSER), and skip without (Debian, Ubuntu: apt-get install $(BROWSER))"

# Delta and Kafka for Spark, once, by Maven. Where no repository answers that is said, and their tests skip.
jars: setup
	@$(BIN)/python -m headwater.pipeline.jars .jars

# The .proto files as the server loads them; a test compares.
PROTOS := src/headwater/serve/grpc/protos
protos: setup
	$(BIN)/python -m grpc_tools.protoc -I $(PROTOS) --descriptor_set_out=$(PROTOS)/protos.bin $(PROTOS)/*.proto

# SochDB's own client, apart from ours: both bring messages of the same names. Where it cannot be had, its tests skip.
SOCHDB := .venv-sochdb
sochdb: $(SOCHDB)/.installed
$(SOCHDB)/.installed: | $(STAMP)
	@{ $(BIN)/uv venv --quiet --clear --python $(BIN)/python $(SOCHDB) && \
	  $(BIN)/uv pip install --quiet --python $(SOCHDB)/bin/python 'sochdb>=0.8.3' && touch $@; } || \
	  { rm -rf $(SOCHDB); echo "SochDB's client cannot be had; the tests with it skip"; }

# One PostgreSQL comes from PyPI; an older one with TLS, MariaDB and the caches only from the system. The tests start
# their own servers of them.
services:
	@missing=; for name in mariadb-install-db mariadbd nginx varnishd; do \
	  PATH="$$PATH:/usr/sbin" command -v $$name >/dev/null || missing="$$missing $$name"; done; \
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$$missing postgresql"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(SERVICES) for the tests of sources, the SQL sink and caches"; \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(SERVICES); } >/dev/null && exit 0; \
	fi; \
	echo "Missing:$$missing. The tests on them skip without (Debian, Ubuntu: apt-get install $(SERVICES))"

demo: setup
	$(BIN)/headwater demo

check: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(PYTEST) -m "not slow and not spark and not soak" -n $(WORKERS)

# Whatever needs Spark comes after the rest and in one process: there is one session for all of it. Both parts run,
# and what failed in either is told last.
test: setup browser services jars sochdb lint types
	@failed=; \
	$(PYTEST) -m "not soak and not spark" -n $(WORKERS) -rs --durations 20 || failed=1; \
	$(PYTEST) -m "spark and not soak" -rs --durations 20 || failed=1; \
	test -z "$$failed" || { $(PYTEST) --cache-show cache/lastfailed; false; }

soak: setup
	SOAK_SEEDS=$${SEEDS:-20} $(PYTEST) -m soak -s --timeout 7200

bench: setup
	$(BIN)/python -m bench

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(SOCHDB) .pytest_cache .mypy_cache .ruff_cache .hypothesis
