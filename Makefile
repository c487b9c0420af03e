# make demo   install, start prefill + decode engine + router, print curl lines
# make test   install, run every test
# make check  lint, types, layers

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check install clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install
	VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/install
	@touch $(STAMP)

demo: $(STAMP)
	@exec $(BIN)/disagg-router demo $(ARGS)

test: $(STAMP)
	@VENV="$(VENV)" scripts/test $(ARGS)

check: $(STAMP)
	@VENV="$(VENV)" scripts/check

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
