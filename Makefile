# make run     create the environment, install, train the main job (a few minutes on 2 cores)
# make test    the same set-up, then the tests
# make slurm   a job that is preempted and requeued by a real Slurm: 7 minutes, needs its packages
# make lint    style, types, layers
#
# The environment is .venv, or what VENV names. ARGS goes to the command: make run ARGS="--rl.seed 1"

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
RUN_FOLDER ?= outputs/rl_ft-$(shell date +%Y%m%d-%H%M%S)

# What the environment depends on: the interpreter, pyproject.toml up to its tool settings, and
# the requirements.
KEY := $(shell ($(PYTHON) --version; sed '/^\[tool\./,$$d' pyproject.toml; cat requirements-*.txt) \
	| sha256sum | cut -c1-16)
INSTALLED := $(VENV)/.installed-$(KEY)
# The editable install points at a checkout: a shared environment is pointed at this one.
HERE := $(shell printf '%s' '$(CURDIR)' | sha256sum | cut -c1-16)
POINTED := $(VENV)/.checkout-$(HERE)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off

export OMP_NUM_THREADS ?= 1

.PHONY: run test test-unit soak slurm lint format rows wheel environment environment-key clean

run: environment
	@$(BIN)/torchtitan run --job.config_file rl_ft.toml --job.dump_folder $(RUN_FOLDER) $(ARGS)

# A library's types without a module are complained of at exit, after pytest's last line.
QUIET_EXIT := PYTHONWARNINGS="ignore:builtin type swig:DeprecationWarning"

test: environment
	@$(QUIET_EXIT) $(BIN)/python -m pytest -q -m "not soak and not slurm" $(ARGS)

test-unit: environment
	@$(BIN)/python -m pytest -q tests/unit $(ARGS)

soak: environment
	@mkdir -p benchmarks/results
	@set -o pipefail; $(BIN)/python -m pytest -m soak -v -rP --durations=0 -p no:warnings $(ARGS) \
		| sed "s#$(CURDIR)#.#g" | tee benchmarks/results/soak.txt

# A real Slurm of one node, from Debian's packages, started and ended by the test.
slurm: environment
	@for program in munged slurmctld slurmd sbatch; do \
		PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || { \
			echo "no $$program: apt-get install slurmctld slurmd slurm-client munge"; exit 1; }; done
	@$(QUIET_EXIT) $(BIN)/python -m pytest -q -m slurm $(ARGS)

lint: environment
	@twice=$$(find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d); [ -z "$$twice" ] || { \
		echo "$$twice: two test files of one name, pytest collects neither"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-logo >$(VENV)/layers.txt || { cat $(VENV)/layers.txt; exit 1; }
	@$(BIN)/pyrefly check --summary=none --min-severity error --python-interpreter-path $(BIN)/python
	@echo "lint: ruff, import-linter and pyrefly found nothing"

format: environment
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

rows: environment
	@$(BIN)/python tools/rows.py

wheel: environment
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . >$(VENV)/wheel.log || { cat $(VENV)/wheel.log; exit 1; }
	@ls dist/*.whl

environment: $(INSTALLED) $(POINTED)

environment-key:
	@echo $(KEY)

# The stamp's name holds the content of the dependency files: times (a fresh clone) do not matter.
$(INSTALLED):
	@echo "installing into $(VENV): about 4 minutes and 11 GB the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[dev]" >$(VENV)/install.log 2>&1 || { tail -n 30 $(VENV)/install.log; exit 1; }
	@rm -f $(VENV)/.installed-* $(VENV)/.checkout-*
	@touch $@ $(POINTED)

$(POINTED): | $(INSTALLED)
	@$(PIP) --no-deps --no-build-isolation -e . >$(VENV)/install.log 2>&1 \
		|| { tail -n 30 $(VENV)/install.log; exit 1; }
	@rm -f $(VENV)/.checkout-*
	@touch $@

clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
