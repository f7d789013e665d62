# On a fresh machine, `make train` trains a small model and `make test` runs the tests. Both create the environment first.
# With TORCH=2.15.0, a target uses that version of torch, and with PY=/path/to/python3.13 that interpreter, in a separate environment.
TORCH ?=
PY ?= python3
VENV := .venv$(TORCH:%=-torch-%)$(addprefix -,$(filter-out python3,$(notdir $(PY))))
NEWEST := 2.15.0
CLIENTS := .venv-clients
CLIENTS_NEWEST := $(CLIENTS)-torch-$(NEWEST)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs-ready
PIP := $(PYTHON) -m pip --disable-pip-version-check install -qq $(if $(TORCH),'torch==$(TORCH)',--constraint constraints.txt)
TRAIN ?=
FINETUNE ?=
REPLICAS ?=
CHAOS ?=
BENCH ?=
REPEAT ?= 20
LANES ?= --numprocesses 2 --dist loadfile
unexport PYTHONDONTWRITEBYTECODE  # without bytecode files every rank of the tests compiles all modules again

.PHONY: help setup setup-newest train finetune replicas test test-all test-newest repeat chaos test-clients check format size wheel try-wheel bench gpu-check gpu-test pictures docs docs-links clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/' | column -t -s '	'

setup: $(READY)  ## create .venv with all dependencies

$(READY): pyproject.toml constraints.txt
	@echo "== creating $(VENV) (once; one or two minutes, mostly for torch)"
	@if [ -z '$(TORCH)' ] && $(PY) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		echo "== using the installed CUDA build of torch"; \
		$(PY) -m venv --system-site-packages $(VENV) && \
		$(PYTHON) -m pip --disable-pip-version-check install -qq --editable '.[test,examples,dev]'; \
	else \
		$(PY) -m venv $(VENV) && $(PIP) torch && $(PIP) --editable '.[test,examples,dev]'; \
	fi
	@touch $(READY)

train: $(READY)  ## train a small language model on two processes, or on one per GPU; TRAIN='--steps 50 ...' passes options
	@ranks=$$($(PYTHON) -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	echo "== training a byte-level language model on $$ranks processes; about three minutes on two cores"; \
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $$ranks examples/train_lm.py --foresight $(TRAIN)

finetune: $(CLIENTS)/.ready  ## load, fine-tune and save a tiny model of transformers on two processes; FINETUNE='--lora 8 ...' passes options
	@ranks=$$($(CLIENTS)/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	echo "== fine-tuning on $$ranks processes; half a minute on two cores"; \
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m torch.distributed.run --standalone --nproc-per-node $$ranks examples/finetune_hf.py $(FINETUNE)

replicas: $(CLIENTS)/.ready  ## train in replica groups under torchft, and show who goes on if one is killed; REPLICAS='--kills 20' passes options
	@OMP_NUM_THREADS=1 $(CLIENTS)/bin/python examples/replicas.py $(REPLICAS)

test: $(READY)  ## run the tests in two pytest workers; repeated tests run a part of their cases, which follows from the commit
	@echo "== running the tests in two pytest workers; make test-all runs every case"
	@$(PYTHON) -m pytest $(LANES)

test-all: $(READY)  ## run the tests with every case of repeated tests
	@echo "== running the tests in two pytest workers, every case"
	@FULLSHARD_TESTS=all $(PYTHON) -m pytest $(LANES)

# The tests that a new torch breaks first: names, parity, schedules, and regressions.
ON_NEWEST := $(addprefix tests/,$(addprefix distributed/test_,fsdp2_surface.py finalization.py grad_dtypes.py gradients_used_again.py addresses.py levels.py hfsdp.py muon.py \
	parity.py sharded_tensor.py) $(addprefix device/test_,capture.py graphs.py programs.py) regressions clients/test_pipelining.py \
	unit/test_torch_is_left_alone.py)

setup-newest:  ## create the environment of test-newest
	@$(MAKE) --no-print-directory TORCH=$(or $(TORCH),$(NEWEST)) setup

test-newest:  ## run a fixed part of the tests on the newest supported torch, or on TORCH=
	@$(MAKE) --no-print-directory TORCH=$(or $(TORCH),$(NEWEST)) LANES='$(LANES) $(ON_NEWEST)' test

repeat: $(READY)  ## run the multi-process tests 20 times, or REPEAT times, and count failed runs
	@failed=0; for run in $$(seq $(REPEAT)); do \
		$(PYTHON) -m pytest -m processes > .repeat 2>&1 && echo "== run $$run: clean" && continue; \
		failed=$$((failed + 1)); echo "== run $$run failed"; cat .repeat; \
	done; rm -f .repeat; echo "== $$failed of $(REPEAT) failed"; test $$failed = 0

chaos: $(READY)  ## end a rank in every way at every place of a small job, 336 jobs; CHAOS='--what SIGKILL --verbose' passes options
	@echo "== ending ranks of small jobs; at most fifteen minutes"
	@OMP_NUM_THREADS=1 $(PYTHON) tests/chaos.py $(CHAOS)

check: $(READY)  ## check format, lint, types, docstrings, pages, pictures and the tables of figures
	@echo "== checking format, lint, types, docstrings, pages, pictures and the tables of figures"
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(PYTHON) scripts/docstrings.py
	@$(PYTHON) scripts/results.py --check
	@$(PYTHON) scripts/pages.py

format: $(READY)  ## format the code, and fix lint findings
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

size:  ## count the lines of src by package, docstrings included
	@python3 scripts/size.py

wheel: $(READY)  ## build the sdist, and from it the wheel, into build/dist
	@rm -rf build/dist && mkdir -p build
	@$(PYTHON) -m build --outdir build/dist . > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls build/dist

# Outside of the checkout, so that nothing is imported from it. The environment has the wheel and what it asks for, nothing else.
try-wheel: wheel  ## install the wheel in an empty environment outside of the checkout, and train two ranks with it
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PY) -m venv "$$folder/env"; \
	"$$folder/env/bin/python" -m pip --disable-pip-version-check install -qq --constraint constraints.txt build/dist/*.whl && \
	cp examples/bottom_up.py "$$folder" && cd "$$folder" && \
	export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore::UserWarning; \
	env/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 bottom_up.py && \
	env/bin/python -c 'import fullshard; print("fullshard", fullshard.__version__, "of", fullshard.__file__)' && env/bin/fullshard --help > /dev/null

bench: $(READY)  ## compare host time, memory and two-rank speed with torch's FSDP2 and DDP; BENCH=--json keeps the figures
	@$(PYTHON) benchmarks/run.py $(BENCH)

# torchtitan, and types of spmd_types once more, on the newest torch, which settings of pip may hold back.
test-clients: $(CLIENTS)/.ready $(CLIENTS_NEWEST)/.ready  ## run accelerate, Lightning, peft, torchao, torchtitan, transformers and others on fullshard (installs them)
	@echo "== running programs of other libraries on fullshard, on one to eight ranks each; about ten minutes"
	@$(CLIENTS)/bin/python -m pytest tests/clients
	@$(CLIENTS_NEWEST)/bin/python -m pytest tests/clients/test_torchtitan.py tests/clients/test_spmd_types.py

$(CLIENTS)/.ready: pyproject.toml constraints.txt tests/clients/requirements.txt
	@echo "== creating $(CLIENTS) (once; several minutes)"
	@python3 -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt torch
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt --editable '.[test]' -r tests/clients/requirements.txt
	@touch $@

$(CLIENTS_NEWEST)/.ready: pyproject.toml tests/clients/requirements-torchtitan.txt
	@echo "== creating $(CLIENTS_NEWEST) (once; several minutes, mostly for torch)"
	@python3 -m venv $(CLIENTS_NEWEST)
	@PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(CLIENTS_NEWEST)/bin/python -m pip --disable-pip-version-check install -qq \
		--editable '.[test]' torch==$(NEWEST) -r tests/clients/requirements-torchtitan.txt
	@touch $@

pictures: $(READY)  ## draw the pictures and write the tables of the documentation from the code
	@$(PYTHON) docs/pictures/draw.py
	@$(PYTHON) scripts/proofs.py
	@$(PYTHON) scripts/levels.py
	@$(PYTHON) scripts/results.py

gpu-check: $(READY)  ## check and measure the stream path on one GPU (torch 2.11 or newer; about six minutes)
	@$(PYTHON) tests/gpu/gpu_check.py

gpu-test: $(READY)  ## run the tests of the CPU with all tensors on one GPU (about five minutes)
	@echo "== running the tests of the CPU on one GPU"
	@FULLSHARD_TESTS=all $(PYTHON) -m pytest tests/gpu --numprocesses 8 --dist load

docs: $(DOCS)  ## build the site into build/site; warnings and broken links are errors
	@echo "== building the site"
	@$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going -b html -d build/doctrees docs build/site
	@echo "== open build/site/index.html"

docs-links: $(DOCS)  ## check the links to other sites
	@$(PYTHON) -m sphinx --quiet -b linkcheck -d build/doctrees docs build/links

$(DOCS): $(READY)
	@echo "== adding the tools that build the site to $(VENV)"
	@$(PYTHON) -m pip --disable-pip-version-check install -qq --editable '.[docs]'
	@touch $@

clean:  ## remove environments, caches and outputs
	rm -rf .venv .venv-torch-* .venv-python* $(CLIENTS) runs build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
