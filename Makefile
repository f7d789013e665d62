# Two commands on a fresh machine: `make train` runs the main job, `make test` the tests. Both set everything up first.
# TORCH=2.15.0 behind any of them takes that torch, in an environment of its own.
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
CLIENTS := .venv-clients
NEWEST := 2.15.0
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs-ready
PIP := $(PYTHON) -m pip --disable-pip-version-check install --quiet $(if $(TORCH),'torch==$(TORCH)',--constraint constraints.txt)
TRAIN ?=
FINETUNE ?=
CHAOS ?=
REPEAT ?= 20
LANES ?= --numprocesses 2 --dist loadfile
unexport PYTHONDONTWRITEBYTECODE  # every rank of the tests would compile the same files

.PHONY: help setup train finetune test test-all test-newest repeat chaos test-clients check format bench gpu-check pictures docs docs-links clean

help:  ## show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/' | column -t -s '	'

setup: $(READY)  ## make .venv with everything

$(READY): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (once; a minute or two, most of it torch)"
	@if [ -z '$(TORCH)' ] && python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		echo "== using the CUDA build of torch that is installed"; \
		python3 -m venv --system-site-packages $(VENV) && \
		$(PYTHON) -m pip --disable-pip-version-check install --quiet --editable '.[test,examples,dev]'; \
	else \
		python3 -m venv $(VENV) && $(PIP) torch && $(PIP) --editable '.[test,examples,dev]'; \
	fi
	@touch $(READY)

train: $(READY)  ## train a small language model on two processes (one per GPU if there are any); TRAIN='--steps 50 ...' passes options
	@ranks=$$($(PYTHON) -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	echo "== training a byte-level language model on $$ranks processes; about three minutes on two cores"; \
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $$ranks examples/train_lm.py --foresight $(TRAIN)

finetune: $(CLIENTS)/.ready  ## fine-tune a tiny model of transformers on two processes, its checkpoint in and out; FINETUNE='--lora 8 ...' passes options
	@ranks=$$($(CLIENTS)/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	echo "== fine-tuning on $$ranks processes; half a minute on two cores"; \
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m torch.distributed.run --standalone --nproc-per-node $$ranks examples/finetune_hf.py $(FINETUNE)

test: $(READY)  ## run the tests, in two lanes; of those that repeat themselves a part, another one each day
	@echo "== running the tests in two lanes; make test-all runs every case"
	@$(PYTHON) -m pytest $(LANES)

test-all: $(READY)  ## run the tests, with every case of those that repeat themselves
	@echo "== running the tests in two lanes, every case"
	@FULLSHARD_TESTS=all $(PYTHON) -m pytest $(LANES)

# What a new torch breaks first: names, parity, schedules, and what went wrong before.
ON_NEWEST := $(addprefix tests/,$(addprefix distributed/test_,fsdp2_surface.py finalization.py grad_dtypes.py addresses.py \
	parity.py sharded_tensor.py docs.py) device regressions clients/test_pipelining.py)

test-newest:  ## run a fixed part of the tests on the newest torch that was tried, or on TORCH=
	@$(MAKE) --no-print-directory TORCH=$(or $(TORCH),$(NEWEST)) LANES='$(LANES) $(ON_NEWEST)' test

repeat: $(READY)  ## run the tests of several processes 20 times, or REPEAT times, and count those that fail
	@failed=0; for run in $$(seq $(REPEAT)); do \
		$(PYTHON) -m pytest -m processes > .repeat 2>&1 && echo "== run $$run: clean" && continue; \
		failed=$$((failed + 1)); echo "== run $$run failed"; cat .repeat; \
	done; rm -f .repeat; echo "== $$failed of $(REPEAT) failed"; test $$failed = 0

chaos: $(READY)  ## every ending of a rank at every place of a job, 336 jobs; CHAOS='--what SIGKILL --verbose' passes options
	@echo "== ending ranks of small jobs; fifteen minutes at most"
	@OMP_NUM_THREADS=1 $(PYTHON) tests/chaos.py $(CHAOS)

check: $(READY)  ## formatting, lint, types and docstrings
	@echo "== checking format, lint, types and docstrings"
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(PYTHON) scripts/docstrings.py

format: $(READY)  ## rewrite the code in its format
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: $(READY)  ## host time, memory and two-rank speed beside torch's FSDP2 and DDP, in one table
	@$(PYTHON) benchmarks/run.py

test-clients: $(CLIENTS)/.ready  ## run accelerate, Trainer, Lightning, peft, torchao, transformers and pipelining on fullshard (installs them)
	@echo "== running programs of other libraries on fullshard, two ranks each; about five minutes"
	@$(CLIENTS)/bin/python -m pytest tests/clients

$(CLIENTS)/.ready: pyproject.toml constraints.txt tests/clients/requirements.txt
	@echo "== setting up $(CLIENTS) (once; several minutes)"
	@python3 -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt torch
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[test]' -r tests/clients/requirements.txt
	@touch $@

pictures: $(READY)  ## draw the pictures of the documentation from the planner, the layout and the tables of moves
	@$(PYTHON) docs/pictures/draw.py

gpu-check: $(READY)  ## check and measure the stream path on one GPU (torch 2.11 or newer; about six minutes)
	@$(PYTHON) tests/gpu/gpu_check.py

docs: $(DOCS)  ## build the site into build/site; warnings, and links that lead nowhere, are errors
	@echo "== building the site"
	@$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going -b html -d build/doctrees docs build/site
	@echo "== open build/site/index.html"

docs-links: $(DOCS)  ## check the site's links to other sites
	@$(PYTHON) -m sphinx --quiet -b linkcheck -d build/doctrees docs build/links

$(DOCS): $(READY)
	@echo "== adding what builds the site to $(VENV)"
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --editable '.[docs]'
	@touch $@

clean:  ## remove what was set up and produced
	rm -rf $(VENV) $(CLIENTS) runs build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
