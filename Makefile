# Everything starts with a private .venv made from requirements.lock; a second run finds it ready.
#   make chat [ARGS="--model …"]   make test [ARGS="-k …"]   make bench   make lint   make format
#   make types   make chaos   make clean
#   PYTHON=/path/to/python3 picks the interpreter; make lock renews the lock file (needs uv).

# The folder of this file, so that `make -f "some where/Makefile" test` works from anywhere.
ROOT := $(shell cd "$$(dirname "$$(printf '%s' '$(MAKEFILE_LIST)' | sed 's/^ //')")" && pwd -P)
HERE := $(shell pwd -P)

ifneq ($(ROOT),$(HERE))

.PHONY: all
all chat test bench lint format types chaos lock setup clean:
	@$(MAKE) --no-print-directory -C "$(ROOT)" $@

else

SHELL := /bin/sh
PY := .venv/bin/python
STAMP := .venv/.installed
UV ?= uv
ARGS ?=

# A moved clone or a removed interpreter makes the stamp worthless.
$(shell [ -x $(PY) ] && [ "$$(cat $(STAMP) 2>/dev/null)" = "$$(pwd -P)" ] || rm -f $(STAMP))

.PHONY: chat test bench lint format types chaos lock setup clean
.DEFAULT_GOAL := chat

chat: $(STAMP)
	@$(PY) -c 'import sys; from everloop.cli.main import main; sys.exit(main())' $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest -q $(ARGS)

bench: $(STAMP)
	@$(PY) benchmarks/run.py $(ARGS)

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(STAMP)
	@$(PY) -m mypy src tests $(wildcard benchmarks)

chaos: $(STAMP)
	@$(PY) -m pytest -q -n 0 -m chaos --timeout 0 $(ARGS)

setup: $(STAMP)
	@:

$(STAMP): requirements.lock pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh

lock:
	$(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra dev \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(ARGS) -o requirements.lock pyproject.toml

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

endif
