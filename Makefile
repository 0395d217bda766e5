# The one door: `make demo` shows it, `make test` proves it. Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(shell grep -rl '^. cython: ' --include='*.py' --include='*.pyx' src/headwater)
PYTEST := $(BIN)/python -m pytest
BROWSER := chromium chromium-driver
SERVICES := mariadb-server nginx varnish postgresql

# Bytecode is kept: without it every server, command and Spark worker that a test starts compiles all its modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup browser services jars protos stream-events sochdb demo check lint types test soak slices bench fmt clean

help:
	@echo "make demo    set up, then show Headwater working on an embedded database"
	@echo "make test    set up, then run every test; WHAT=feeds runs the tests of one room"
	@echo "make check   lint, types and the fast tests (under two minutes)"
	@echo "make soak    long random runs: SEEDS=20 by default"
	@echo "make bench   side-by-side benchmarks; ratios go to bench/RESULTS.md by hand"

setup: $(STAMP)

$(STAMP): pyproject.toml hatch_build.py $(COMPILED)
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: install python3 and python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; PYTHON=/path/to/python3.11 make …"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[dev]'
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
	@$(BIN)/python -m headwater.pipeline.spark.jars .jars

# The .proto files as the server loads them; a test compares.
PROTOS := src/headwater/serve/grpc/protos
protos: setup
	$(BIN)/python -m grpc_tools.protoc -I $(PROTOS) --descriptor_set_out=$(PROTOS)/protos.bin $(PROTOS)/*.proto

# The JavaScript client's copy of model/control_events.py.
stream-events: setup
	$(BIN)/python -m tests.suite.stream_events_js

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

check: setup
	@$(BIN)/python -m tests.suite.run --fast

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Everything, in parts that run side by side; or the tests of one room (WHAT=feeds, WHAT=sources/postgres) with what
# that room needs. The time of each part, the slowest tests and all failures are printed last.
NEEDS_browser := browser
NEEDS_caches := services
NEEDS_cli := services jars
NEEDS_conformance := services sochdb
NEEDS_guarantees := services jars
NEEDS_pipeline := services jars
NEEDS_sources := services
NEEDS := $(if $(WHAT),$(NEEDS_$(firstword $(subst /, ,$(WHAT)))),browser services jars sochdb)
test: setup $(NEEDS)
	@$(BIN)/python -m tests.suite.run $(WHAT)

# The long random runs: SEEDS of each nemesis, as many schemas, and ten times the examples of the property tests.
soak: setup browser services jars
	seed=$${SOAK_SEED:-$$(git rev-parse --short=8 HEAD)}; SOAK_SEED=$$seed SOAK_SEEDS=$${SEEDS:-20} \
	  HYPOTHESIS_PROFILE=soak $(PYTEST) -m "soak or hypothesis" -s --timeout 7200 --hypothesis-seed $$((0x$$seed))

# About SECONDS of them, chosen by the commit: other ones after every commit, the same ones for the same commit.
SECONDS ?= 1200
slices: setup browser services jars
	seed=$${SOAK_SEED:-$$(git rev-parse --short=8 HEAD)}; SOAK_SEED=$$seed HYPOTHESIS_PROFILE=soak \
	  $(PYTEST) -m "soak or hypothesis" --slices $(SECONDS) -vv --timeout 900 --hypothesis-seed $$((0x$$seed))

bench: setup
	$(BIN)/python -m bench

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(SOCHDB) .test-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
