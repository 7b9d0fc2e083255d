# Everything starts with a private .venv made from the lock files; a second run finds it ready.
#   make chat [ARGS="--model …"]   make test [ARGS="-k …"]   make quick   make eval   make bench   make lint
#   make format   make types   make chaos   make failover   make pictures   make docs   make race   make clean
#   PYTHON=/path/to/python3 picks the interpreter; make lock renews the lock files (needs uv).

# The folder of this file, so that `make -f "some where/Makefile" test` works from anywhere.
ROOT := $(shell cd "$$(dirname "$$(printf '%s' '$(subst ','\'',$(MAKEFILE_LIST))' | sed 's/^ //')")" && pwd -P)
HERE := $(shell pwd -P)

.PHONY: chat test quick eval record bench race lint format types chaos failover pictures docs lock setup clean
.DEFAULT_GOAL := chat

ifneq ($(ROOT),$(HERE))

chat test quick eval record bench race lint format types chaos failover pictures docs lock setup clean:
	@$(MAKE) --no-print-directory -C "$(ROOT)" $@

else

SHELL := /bin/sh
# Each process of the tests would compile pytest's plugins for itself.
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
READY_DOCS := .venv-docs/.ready
UV ?= uv
PIN = $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate \
	--no-emit-index-url --no-emit-find-links $(ARGS)
COMPILE = $(PIN) --group build pyproject.toml
ARGS ?=
# The tier that finds most mistakes: pure code and single processes, without PostgreSQL, kills, browsers or model weights.
QUICK = tests/engine tests/config tests/context tests/goals tests/sandbox tests/testing tests/tools/policy \
	$(addprefix tests/providers/test_,endpoints.py factory.py options.py retry.py) \
	$(addprefix tests/test_,activity.py architecture.py bus.py commands.py log.py messages.py package.py replay.py \
	spec_examples.py text.py)

# A moved clone or a removed interpreter makes the stamps worthless.
$(shell [ -x $(PY) ] && [ "$$(cat $(READY) 2>/dev/null)" = "$$(pwd -P)" ] || rm -f $(READY) $(READY_DEV))

chat: $(READY)
	@EVERLOOP_PULL=$${EVERLOOP_PULL-1} .venv/bin/everloop $(ARGS)

test: $(READY_DEV)
	@$(PY) -m pytest -q $(ARGS)

quick: $(READY_DEV)
	@$(PY) -m pytest -q $(QUICK) $(ARGS)

eval: $(READY_DEV)
	@$(PY) -m evaluation $(ARGS)

# Asks the model again what the tests replay. It needs the weights: `everloop model pull qwen2.5-coder-1.5b`.
record: $(READY_DEV)
	@for set in first_things reminders; do \
	rm -f evaluation/recordings/$$set.new && \
	$(PY) -m evaluation --set $$set --provider local --model qwen2.5-coder-1.5b --limit 900 --verbose --at-least 0 100 \
	--record evaluation/recordings/$$set.new && \
	mv evaluation/recordings/$$set.new evaluation/recordings/$$set.jsonl || exit 1; done

bench: $(READY_DEV)
	@$(PY) benchmarks/run.py $(ARGS)

# Everloop and other runtimes in one run. Installs those that are missing into .peers, by name and pinned version.
race: $(READY_DEV)
	@$(PY) benchmarks/race.py --setup --write $(ARGS)

pictures: $(READY_DEV)
	@$(PY) -m tests.pictures

# The site, from docs/, in site/: open site/index.html. Its packages have an environment of their own.
docs: $(READY_DOCS)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet --strict
	@echo "Built site/index.html"

lint: $(READY_DEV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(READY_DEV)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(READY_DEV)
	@$(PY) -m mypy src tests $(wildcard benchmarks evaluation)
	@sh scripts/web_types.sh

# The long forms of the tests that kill processes: every commit, thousands of messages.
chaos: $(READY_DEV)
	@sh scripts/system.sh failover
	@$(PY) -m pytest -q -n 0 -m chaos --timeout 0 $(ARGS)

# Failovers of a PostgreSQL with a synchronous standby under the history checker: 50 primaries killed, 10 behind PgBouncer, 10
# frozen, 10 cut off, and 10 standbys and poolers lost; planted faults that these tests must find; and the cluster of deploy/ha,
# with Patroni and three etcd on machines that are network namespaces: 36 of them killed, lost, frozen and cut off (needs root).
# Each test ends within its limit of 10 to 60 minutes, and says how far it is.
failover: $(READY_DEV)
	@sh scripts/system.sh failover
	@$(PY) -m pytest -v -n 0 -m chaos \
	$(addprefix tests/store/postgres/test_,failover.py failover_checker.py patroni.py) $(ARGS)

setup: $(READY_DEV)
	@:

$(READY): requirements.lock pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh

$(READY_DEV): $(READY) requirements-dev.lock
	@sh scripts/setup.sh dev

$(READY_DOCS): requirements-docs.lock scripts/setup.sh
	@sh scripts/setup.sh docs

lock:
	$(COMPILE) --extra all -o requirements.lock
	$(COMPILE) -c requirements.lock --extra all --extra dev -o requirements-dev.lock
	$(PIN) --group docs -o requirements-docs.lock

clean:
	rm -rf .venv .venv-docs site .clients .peers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests $(wildcard benchmarks evaluation) -name __pycache__ -type d -prune -exec rm -rf {} +

endif
