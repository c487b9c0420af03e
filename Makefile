# make demo   install, start prefill + decode engine + router, print curl lines
# make test   install, run every test but those inside vLLM
# make test-vllm   install vLLM's CPU build, run the connector inside it, and its core inside the newest
# make test-vllm-all   what is too long for that, and all of it inside the newest too: well over an hour
# make test-k8s   build an API server, fetch Helm and gateways: the chart, discovery, Envoy and Traefik
# make test-clients   install OpenAI's, Anthropic's and others' clients: each asks a router
# make compiled   this checkout again in build/compiled, with the router's hot path compiled: a minute, gcc
# make test-compiled   that, and the router's tests there
# make test-lowest   the router's tests with the lowest versions that pyproject.toml admits
# make simulate   ten thousand seeds of a world in which everything goes wrong
# make soak   thousands of requests, clients that leave, engines killed and frozen, forged messages
# make chaos  engines and routers killed, frozen and worse under load: what clients see of it
# make check  lint, types, layers
# make docs   build the documentation as a site (build/site), strictly

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Of vLLM, beside the build; the last one is the newest.
RELEASES := $(shell sed -n 's/^vllm[^=]*==\([^ ]*\).*/\1/p' scripts/vllm_wheels.txt)

.PHONY: demo test test-vllm test-vllm-all test-k8s test-clients test-lowest compiled test-compiled simulate soak chaos check docs install clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install
	VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/install
	@touch $(STAMP)

demo: $(STAMP)
	@exec $(BIN)/disagg-router demo $(ARGS)

test: $(STAMP)
	@scripts/install_redis
	@scripts/install_browser
	@VENV="$(VENV)" scripts/test -n 2 --dist loadfile $(ARGS)

test-vllm: $(STAMP)
	PYTHON="$(PYTHON)" scripts/install_vllm $(RELEASES)
	@VENV="$(VENV)" scripts/test tests/vllm -m "not more" --timeout 600 $(ARGS)

test-vllm-all: $(STAMP)
	PYTHON="$(PYTHON)" scripts/install_vllm $(RELEASES)
	@VENV="$(VENV)" scripts/test tests/vllm --timeout 600 $(ARGS)
	@VENV="$(VENV)" DISAGG_VLLM_VENV="$$(PYTHON="$(PYTHON)" scripts/install_vllm $(RELEASES) | tail -n 1)" \
		scripts/test tests/vllm --ignore-glob "*/test_next_*" --ignore-glob "*/test_stock*" \
		--ignore tests/vllm/test_releases.py --ignore tests/vllm/test_layouts.py --timeout 600 $(ARGS)

test-k8s: $(STAMP)
	PYTHON="$(BIN)/python" scripts/install_helm
	PYTHON="$(BIN)/python" scripts/install_k8s
	scripts/install_promtool
	@VENV="$(VENV)" scripts/test tests/k8s -n 2 --dist loadfile --timeout 600 $(ARGS)

test-clients: $(STAMP)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/test_clients --timeout 120 $(ARGS)

test-lowest:
	PYTHON="$(PYTHON)" scripts/test_lowest -n 2 --dist loadfile $(ARGS)

compiled: $(STAMP)
	@$(BIN)/python scripts/compile_router.py build/compiled

# The tests of it that put a request through whole: the rest is as it was. A plan is tested with
# doubles, which compiled functions do not take.
COMPILED := $(addprefix tests/unit/router/,api conversations dialects flows upstream test_front.py \
	test_hostile.py test_preempted.py test_resume.py test_stalled.py test_traces.py)

test-compiled: compiled
	@scripts/install_redis
	@cd build/compiled && VENV="$(abspath $(VENV))" scripts/test $(COMPILED) \
		tests/integration/test_robustness.py --ignore tests/unit/router/flows/test_plan.py \
		-n 2 --dist loadfile $(ARGS)

simulate: $(STAMP)
	@$(BIN)/python -m tests.unit.engine_ext.simulation.run $(ARGS)

soak: $(STAMP)
	@VENV="$(VENV)" scripts/test tests/soak --log-cli-level INFO $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python scripts/chaos.py --check $(ARGS)

check: $(STAMP)
	@VENV="$(VENV)" scripts/check

docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
