# Every target sets up what it needs by itself, under .venv/; Python 3.11 or newer and make are enough.
#
#   PYTHON=/path/to/python make test    chooses the interpreter
#   make pytest PYTEST_ARGS='-x -k ring'    runs some tests only

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-others lint pytest format test-gpu bench bench-matmul bench-tpu bench-gpu bench-rolled bench-decisions bench-nets bench-programs bench-layers clean
MAKEFLAGS += --no-print-directory
SHELL := /bin/sh
export PYTHON

# Any Python will do to look for the right one.
FINDER := $(shell for p in "$(PYTHON)" python3 python python3.12 python3.11 /usr/bin/python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && echo "$$p" && break; done)
PAIRS := $(if $(FINDER),"$(FINDER)",echo "no Python found; name one with PYTHON=..." >&2; exit 1;) .ci/pairs.py

PAIR ?= $(eval PAIR := $(shell $(PAIRS) first))$(PAIR)
PYTEST_ARGS ?= -n auto --maxprocesses=8 --dist worksteal

# Shell: $$python is the interpreter of PAIR's environment, ready to use.
define ready
[ -n "$(PAIR)" ] && python=$$($(PAIRS) python $(PAIR))
endef

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 20

demo: ## trains a small decoder with and without the rewrite, and compiles it for a TPU pod
	@$(ready) && "$$python" -m overlap demo

test: lint pytest ## lints and tests with the first supported Python found

test-all: test test-others ## the same with every supported pair of Python and jax found

test-others:
	@others=$$($(PAIRS) others) && failed= && for pair in $$others; do \
		$(MAKE) lint pytest PAIR=$$pair || failed="$$failed $$pair"; \
	done && if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

test-gpu: ## the tests that compile for GPUs, in an environment of its own; needs no GPU
	@python=$$($(PAIRS) gpu) && echo "== tests with the GPU compiler" && "$$python" -m pytest $(PYTEST_ARGS) tests/passes/test_gpu_starts.py

lint: ## ruff (format and check) and mypy (strict)
	@$(ready) && echo "== lint, $(PAIR)" && "$$python" -m ruff format --check . \
		&& "$$python" -m ruff check . && "$$python" -m mypy

pytest: ## the tests alone
	@$(ready) && echo "== tests, $(PAIR)" && "$$python" -m pytest $(PYTEST_ARGS)

format: ## rewrites the sources as lint wants them
	@$(ready) && "$$python" -m ruff format . && "$$python" -m ruff check --fix .

bench: ## the overhead benchmarks
	@$(ready) && "$$python" bench/overhead.py

bench-matmul: ## tables of matmul times, from the TPU compiler (needs libtpu, no TPU), and their errors
	@$(ready) && "$$python" -m bench.matmul_tables $(BENCH_ARGS)

bench-tpu: ## compares schedules by the TPU compiler (hours; BENCH_ARGS='--rows REGEX' for some)
	@$(ready) && "$$python" -m bench.tpu_schedules $(BENCH_ARGS)

bench-rolled: ## compile times and hops of rolled rings on 16 to 256 devices, by the TPU compiler (minutes)
	@$(ready) && "$$python" -m bench.rolled_rings $(BENCH_ARGS)

bench-decisions: ## judges the cost model's decisions on random chains by the TPU compiler (an hour or two)
	@$(ready) && "$$python" -m bench.decisions $(BENCH_ARGS)

bench-nets: ## random MLPs of several layers, with and without gradients, by the TPU compiler (an hour)
	@$(ready) && "$$python" -m bench.nets $(BENCH_ARGS)

bench-programs: ## training steps of a layer for five TPUs, by the TPU compiler (half an hour)
	@$(ready) && "$$python" -m bench.tpu_programs $(BENCH_ARGS)

bench-layers: ## training steps as people write them, drawn, by the TPU compiler (two hours)
	@$(ready) && "$$python" -m bench.layers $(BENCH_ARGS)

bench-gpu: ## compares schedules by the GPU compiler, in an environment of its own; needs no GPU
	@python=$$($(PAIRS) gpu) && "$$python" -m bench.gpu_schedules $(BENCH_ARGS)

clean: ## removes the environments and everything built
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
