# Times are of two cores, once everything is installed.
# make demo           start a prefill engine, a decode engine and a router; print curl lines
# make test           4 min: unit tests, simulation, one smoke test per promise
# make test-changed   under 30 s a folder: the fast tests of the folders you changed
# make test-all       20 min: make test, and slow tests, Redis, a browser, real engines in depth
# make test-vllm      10 min: the connector inside vLLM's CPU builds (3 GB to install)
# make test-k8s       3 min: the chart, discovery, gateways on a real API server
# make test-clients   3 min: OpenAI's, Anthropic's and other clients, and examples/
# make test-agents    1 min: Claude Code, Codex and opencode as npm has them (1 GB)
# make test-nightly   hours: all of the above, what CI leaves out, all of it in the newest vLLM
# make test-lowest    the router's tests with the lowest versions that pyproject.toml admits
# make simulate       ten thousand seeds of the simulated engines
# make soak           thousands of requests while engines are killed and frozen
# make chaos          4 min: failure drills under load, and what clients see of each
# make check          30 s: lint, types, layers
# make docs           1 min: the documentation as a site (build/site); its links and shell blocks

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# Of vLLM, beside the build; the last one is the newest.
RELEASES := $(shell sed -n 's/^vllm[^=]*==\([^ ]*\).*/\1/p' scripts/vllm_wheels.txt)

.PHONY: demo test test-changed test-all test-nightly test-vllm test-vllm-nightly test-k8s test-clients test-agents test-lowest simulate soak chaos check docs install install-vllm clean help

help:
	@sed -n '/^# make\|^# Times/s/^# //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install
	VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/install
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt scripts/install
	VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/install demo
	@touch $(DEMO_STAMP)

demo: $(DEMO_STAMP)
	@exec $(BIN)/disagg-router demo $(ARGS)

# Markers: `slow` is what `make test` leaves out, `nightly` what CI leaves out as well.
test: $(STAMP)
	@VENV="$(VENV)" scripts/test tests/smoke tests/unit -m "not slow and not nightly" \
		-n 2 --dist loadfile $(ARGS)

test-changed: $(STAMP)
	@$(BIN)/python scripts/test_changed $(ARGS)

test-all: $(STAMP)
	@scripts/install_debian redis-server redis-server
	@scripts/install_debian nginx nginx
	@scripts/install_browser
	@VENV="$(VENV)" scripts/test tests/smoke tests/unit tests/integration -n 2 --dist loadfile $(ARGS)

install-vllm: $(STAMP)
	PYTHON="$(PYTHON)" scripts/install_vllm $(RELEASES)
	PYTHON="$(PYTHON)" scripts/install_mooncake

test-vllm: install-vllm
	@VENV="$(VENV)" scripts/test tests/vllm -m "not nightly" -n 2 --dist loadfile --timeout 600 $(ARGS)

test-vllm-nightly: install-vllm
	@VENV="$(VENV)" scripts/test tests/vllm --timeout 600 $(ARGS)
	@VENV="$(VENV)" DISAGG_VLLM_VENV="$$(PYTHON="$(PYTHON)" scripts/install_vllm $(RELEASES) | tail -n 1)" \
		scripts/test tests/vllm --ignore-glob "*/test_next_*" --ignore-glob "*/test_stock*" \
		--ignore tests/vllm/test_releases.py --ignore tests/vllm/test_layouts.py --timeout 600 $(ARGS)

test-nightly: export DISAGG_NEW_EXAMPLES = 1
test-nightly: check docs test-all test-vllm-nightly test-k8s test-clients test-agents simulate soak chaos

test-k8s: $(STAMP)
	PYTHON="$(BIN)/python" scripts/install_helm
	PYTHON="$(BIN)/python" scripts/install_k8s
	scripts/install_promtool
	@VENV="$(VENV)" scripts/test tests/k8s -n 2 --dist loadfile --timeout 600 $(ARGS)

test-clients: $(STAMP)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/test_clients -m "not nightly" $(ARGS)

test-agents: $(STAMP)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/test_clients --timeout 900 -m nightly $(ARGS)

test-lowest:
	PYTHON="$(PYTHON)" scripts/test_lowest -n 2 --dist loadfile $(ARGS)

simulate: $(STAMP)
	@$(BIN)/python -m tests.unit.engine_ext.simulation.run $(ARGS)

soak: $(STAMP)
	@VENV="$(VENV)" scripts/test tests/soak --log-cli-level INFO $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python scripts/bench.py chaos --check $(ARGS)

check: $(STAMP)
	@VENV="$(VENV)" scripts/check

docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/codespell docs *.md router engine_ext charts examples
	@VENV="$(VENV)" scripts/test tests/docs -q $(ARGS)
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
