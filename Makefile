# Two variables may be set from outside: the interpreter that makes the virtual environment, and where it lies.
PYTHON ?= python3
VENV ?= .venv
ORACLE_VENV := .venv-oracle
DOCS_VENV := .venv-docs

# Shows a command as a person types it, then runs it with the virtual environment's programs.
run = @echo '$$ $(1)'; PATH="$(abspath $(VENV))/bin:$$PATH" HF_HUB_OFFLINE=1 $(1)

# Each of the many programs that tests start would otherwise compile xrank anew.
unexport PYTHONDONTWRITEBYTECODE

# One worker more than there are cores, as some tests wait; each has up to 8 ranks of its own. Where -m is given twice,
# the last counts.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 8))')
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-all soak faults oracle corpus lint house package matrix docs bench clean figures release

help:
	@echo 'make demo    4 ranks train and leave shards in demo/workspace; gathers, verifies and compares them'
	@echo 'make test    the tests, without the slow ones; make test ARGS="-k gather -x" passes options to pytest'
	@echo '             make test ARGS="-m quick" runs a cross-section in less than a minute'
	@echo 'make test-all'
	@echo '             all tests'
	@echo 'make soak    200,000 gathers of ranks that raise and die, and every seeded kill, where make test takes a part'
	@echo 'make faults  kills, failing calls, damaged bytes, hostile inputs and power losses by the thousand, from a seed'
	@echo 'make oracle  compares with what other programs do, in $(ORACLE_VENV); make oracle ARGS="-m slow" does the rest'
	@echo 'make corpus  trainers make 400 folders in corpus/, and xrank gathers each; half an hour, in $(ORACLE_VENV)'
	@echo '             make corpus ARGS="zero3 lora" takes the folders whose names contain one of the texts'
	@echo 'make lint    format, style, layers and types'
	@echo 'make house   counts the library: lines, modules, floors, and the functions that three calls pass'
	@echo 'make package builds wheel and source archive in dist/, checks them, and uses them where nothing else is'
	@echo 'make matrix  the tests under Python 3.11 to 3.14, with the oldest torch and the newest, and without torch'
	@echo '             make matrix PYTHONS=3.12 TORCHES=none takes a part; other options go to pytest by ARGS'
	@echo 'make docs    builds the site of the docs in build/docs, in $(DOCS_VENV); a broken link fails it'
	@echo 'make bench   times a gather'
	@echo 'make figures lists the figures of README and docs that are older than the code that they measure'
	@echo 'make release VERSION=0.1.0 checks, tags and builds a release, and prints what to upload'
	@echo 'make clean   removes what the demo made'
	@echo 'The first of them makes the virtual environment $(VENV) with $(PYTHON).'

$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	@echo 'setting up $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet -c .ci/constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready clean
	$(call run,python examples/train_shards.py --ranks 4 --workspace demo/workspace --reference demo/reference)
	$(call run,xrank inspect demo/workspace)
	$(call run,xrank gather --workspace demo/workspace --out demo/model)
	$(call run,xrank verify demo/model)
	$(call run,python examples/compare_model.py demo/model demo/reference)
	@echo; echo 'Now one bit of one rank goes bad:'
	$(call run,python examples/flip_byte.py demo/workspace demo/damaged)
	$(call run,xrank gather --workspace demo/damaged --out demo/refused); status=$$?; \
	test $$status -eq 4 || { echo "demo: want a refusal (exit code 4), got exit code $$status"; exit 1; }; \
	test ! -e demo/refused || { echo 'demo: a refused gather left demo/refused'; exit 1; }; \
	echo 'refused  exit code 4, and there is no demo/refused'

test: $(VENV)/.ready
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: $(VENV)/.ready
	$(PYTEST) $(ARGS)

soak: $(VENV)/.ready
	$(VENV)/bin/python -m pytest --soak -s tests/workspace tests/commands/test_shared_gather.py \
	  tests/commands/test_gather_killed.py tests/commands/test_export_killed.py \
	  tests/virtual/test_device_failures.py tests/gradients/test_dead_ranks.py tests/gradients/test_right_runs.py \
	  tests/gradients/test_plan_mutants.py tests/distribution/test_model_kinds.py tests/distribution/test_every_module.py \
	  tests/refit/test_struck.py tests/refit/test_pairs.py tests/storage/test_reading_faults.py \
	  tests/storage/test_writing_faults.py tests/storage/test_replacing.py tests/storage/test_promises.py $(ARGS)

faults: $(VENV)/.ready
	$(VENV)/bin/python -m tests.faults $(ARGS)

$(ORACLE_VENV)/.ready: pyproject.toml .ci/oracle-constraints.txt
	@echo 'setting up $(ORACLE_VENV)'
	@$(PYTHON) -m venv $(ORACLE_VENV)
	@$(ORACLE_VENV)/bin/python -m pip install --quiet -c .ci/oracle-constraints.txt -e '.[oracle]'
	@$(ORACLE_VENV)/bin/python -m pip install --quiet --no-deps -c .ci/oracle-constraints.txt torchtitan spmd_types tyro docstring_parser mooncake-transfer-engine-non-cuda \
	  llmcompressor compressed-tensors loguru
	@touch $@

# Other programs' warnings are not ours to fix.
oracle: $(ORACLE_VENV)/.ready
	$(ORACLE_VENV)/bin/python -m pytest -W ignore -n 2 --dist loadfile -m 'not slow' tests/oracle $(ARGS)

# A cell's folder is made once; remove corpus/ to have them made anew.
corpus: $(ORACLE_VENV)/.ready
	$(ORACLE_VENV)/bin/python -m tests.oracle.trainers.make corpus $(ARGS)
	$(ORACLE_VENV)/bin/python -m tests.oracle.trainers.check corpus $(ARGS) $(if $(ARGS),,--table tests/oracle/trainers/RESULTS.md)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

house: $(VENV)/.ready
	@$(VENV)/bin/python benchmarks/house.py --walk

package: $(VENV)/.ready
	@rm -rf dist
	$(call run,uv build --quiet --out-dir dist)
	$(call run,uv tool run twine check --strict dist/*.whl dist/*.tar.gz)
	$(call run,uv tool run check-wheel-contents dist/*.whl)
	$(VENV)/bin/python -m pytest tests/test_wheel.py $(ARGS)

figures: $(VENV)/.ready
	$(VENV)/bin/python -m benchmarks.figures

release: $(VENV)/.ready
	.ci/release $(VERSION)

PYTHONS ?= 3.11 3.12 3.13 3.14
TORCHES ?= none 2.10.* newest
matrix: $(VENV)/.ready
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHONS="$(PYTHONS)" TORCHES="$(TORCHES)" .ci/matrix $(ARGS)

$(DOCS_VENV)/.ready: pyproject.toml
	@echo 'setting up $(DOCS_VENV)'
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet -e '.[docs]'
	@touch $@

# Needs no network: pages, fonts and scripts are files of the site.
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet

bench: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/gather.py $(ARGS)

clean:
	@rm -rf demo
