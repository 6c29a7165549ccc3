# make sweep    run the default experiment and write its report; needs no root     (make sweep ARGS=--quick)
# make check    run the tests that need no privilege, no network and little time
# make test     test what this machine can test, with a rotating quarter of the slow tests: four runs in a row cover them
#               all (at once: TESTBED_PART=all make test; a few: make test ARGS='-k codecs'). Tests decided by time run in
#               a guest with a virtual clock
# make examples test what needs hivemind, Flower, torchft, ns-3 or Ray, in an environment of its own; needs no root
# make gpu-checks  check a GPU: tests, speed, losses, codecs, a training; at most 25 minutes; needs a torch with CUDA
# make lint     check style, types, who imports whom, and that no generated page is stale
# make clean    remove what these made; results stay
#
# PYTHON=...    the Python that .venv is made with (3.11 or newer)
# PIP_TORCH=... options for the installation of torch alone, e.g. PIP_TORCH='--index-url URL' for another build of it

ARGS ?=
PYTHON ?=
PIP_TORCH ?=
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# Networks need root: sudo where we are not root and there is a sudo. It forgets the environment, so what matters is repeated,
# and what Python would leave in the checkout as root's is not written.
SUDO := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)
AS_ROOT := $(if $(SUDO),$(SUDO) env PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/root/.cache/hypothesis \
  CI='$(CI)' TESTBED_REQUIRE='$(TESTBED_REQUIRE)' OMP_NUM_THREADS='$(OMP_NUM_THREADS)' \
  $(if $(TESTBED_PART),TESTBED_PART='$(TESTBED_PART)'))
CACHES := $(if $(SUDO),-p no:cacheprovider)
TEST := $(AS_ROOT) .venv/bin/python -m pytest $(CACHES)
# One more than there are processors: some tests wait.
WORKERS := --numprocesses=$(shell echo $$(($$(nproc) + 1))) --maxprocesses=4
# Every worker reads the same modules, and so do the programs that tests start: they are compiled once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# The tests' tensors are small and their processes run side by side: one thread each.
export OMP_NUM_THREADS ?= 1
CANDIDATES := $(or $(PYTHON),python3.11 python3 python3.14 python3.13 python3.12)
BROKEN := $(shell [ ! -e .venv/.python ] || .venv/bin/python -c '' 2>/dev/null || echo yes)
INSTALL := -m pip install --quiet --disable-pip-version-check
PIP := .venv/bin/python $(INSTALL) --constraint constraints.txt
PIP_EXAMPLES := .venv-examples/bin/python $(INSTALL) --constraint examples/constraints.txt

.PHONY: help sweep check test examples gpu-checks lint clean FORCE
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# Needs no root: it plays on the virtual clock.
sweep: .venv/.test
	.venv/bin/python -m testbed sweep $(ARGS)

check: .venv/.test # none of these tests waits
	.venv/bin/python -m pytest --numprocesses=$(shell nproc) --maxprocesses=4 -m 'not (root or netem or gpu or slow or clock_kernel)' $(ARGS)

test: .venv/.test
	$(TEST) $(WORKERS) $(ARGS)

examples: .venv-examples/.made
	TESTBED_PART=all TESTBED_REQUIRE='hivemind,flower,torchft,ns3,ray,$(TESTBED_REQUIRE)' .venv-examples/bin/python -m pytest --durations=5 \
	  -m 'hivemind or flower or torchft or ns3 or ray' tests/examples tests/torch_codecs tests/ns3 tests/sweep/test_ray_cluster.py \
	  $(ARGS)

gpu-checks: .venv/.test
	.venv/bin/python -m tests.gpu_checks $(ARGS)

lint: .venv/.lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python -m testbed docs --check

# torch first and alone: it is by far the largest, and its constraint also fits a build of one's own (2.13.0+cpu).
.venv/.test: .venv/.python pyproject.toml constraints.txt
	@echo 'Installing into .venv (once; some minutes on a slow line) ...'
	$(PIP) $(PIP_TORCH) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[test]'
	@touch $@

.venv-examples/.made: .venv/.python pyproject.toml examples/constraints.txt
	@echo 'Installing into .venv-examples (once; some minutes on a slow line) ...'
	.venv/bin/python -m venv --clear .venv-examples
	$(PIP_EXAMPLES) $(PIP_TORCH) "$$(grep '^torch==' examples/constraints.txt)"
	$(PIP_EXAMPLES) --editable '.[examples]'
	@touch $@

.venv/.lint: .venv/.test
	$(PIP) --editable '.[lint]'
	@touch $@

.venv/.python: $(if $(BROKEN),FORCE)
	@python=''; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'testbed needs Python 3.11 or newer and found none; tried: $(CANDIDATES).' \
	    'Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3' >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$python cannot make a virtual environment: its venv module is missing." \
	    "Debian, Ubuntu: apt install python3-venv" >&2; exit 1; \
	fi; \
	"$$python" -m venv --clear .venv
	@touch $@

clean:
	rm -rf .venv .venv-examples .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find testbed tests -name __pycache__ -type d -prune -exec rm -rf {} +
