# Common commands. Each target first installs what it needs into $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# For test-pythons: the interpreters, and the tests that run under each.
PYTHONS ?= python3.12 python3.13
SCALE ?= paper
SHORT = tests/learners tests/models tests/test_config.py tests/test_credit.py tests/test_method.py

.PHONY: imdb imdb-ppo gsm8k gsm8k-ppo test test-slow test-pythons test-all notebook docs tables paper check-results lint dist clean

imdb: $(VENV)/.installed      ## CORY on IMDB, toy setting: minutes on two CPU cores
	$(RUN) imdb_train/cory.py

imdb-ppo: $(VENV)/.installed  ## its PPO baseline
	$(RUN) imdb_train/ppo.py

gsm8k: $(VENV)/.installed     ## CORY on GSM8K, toy setting
	$(RUN) gsm8k_train/cory.py

gsm8k-ppo: $(VENV)/.installed ## its PPO baseline
	$(RUN) gsm8k_train/ppo.py

# Without --no-loadscope-reorder, files with few tests would run last, although they take longest.
test: $(VENV)/.installed-dev  ## the test suite, without the slow tests, in two processes of one thread each
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

test-slow: $(VENV)/.installed-dev  ## the slow tests, which train the toy models again: minutes
	$(RUN) -m pytest -m slow

notebook: $(VENV)/.installed-dev  ## executes the quick start into runs/quick_start.ipynb; fails if a cell does
	mkdir -p runs
	OMP_NUM_THREADS=1 $(VENV)/bin/jupyter-execute --timeout=300 --output=../runs/quick_start notebooks/quick_start.ipynb

docs: $(VENV)/.installed-docs  ## the documentation site, into build/site; fails on a warning or a dead link
	$(RUN) docs/site.py

tables: $(VENV)/.installed    ## writes the tables in README, docs and results from the files under results/; FLAGS=--check only compares
	$(RUN) -m study.tables $(FLAGS)

check-results: $(VENV)/.installed  ## repeats the beginning of each experiment's first run, if results/ keeps it, and compares the numbers
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) -m results.check

paper: $(VENV)/.installed     ## the paper's IMDB experiment, on a GPU, with models of the Hub; SCALE=gpt2 for a smaller card, FLAGS=--dry-run shows the commands
	$(RUN) -m study.experiment configs/experiments/imdb_table1.yaml --scale $(SCALE) --jobs 1 --discard-agents --out results/imdb_table1_$(SCALE) $(FLAGS)

test-pythons:                 ## $(SHORT) under each of $(PYTHONS) that is installed, in .venv-3.12, .venv-3.13; downloads torch for each
	@failed=; for python in $(PYTHONS); do \
	  if ! $$python -c '' 2>/dev/null; then echo "$$python: not found or does not start, not tested"; continue; fi; \
	  $(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$${python#python} TESTS="$(SHORT)" \
	    && echo "$$python: passed" || failed="$$failed $$python"; \
	done; if [ -n "$$failed" ]; then echo "failed under:$$failed"; exit 1; fi

test-all: test test-slow test-pythons  ## all tests, and runs that are killed and resumed
	$(RUN) benchmarks/kills.py --kills 3 2

lint: $(VENV)/.installed-dev  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

dist:                         ## wheel and source distribution, into build/dist, checked
	rm -rf build/dist && mkdir -p build/dist
	$(PYTHON) -m venv build/dist-venv
	build/dist-venv/bin/python -m pip install --quiet build twine
	build/dist-venv/bin/python -m build --outdir build/dist .
	build/dist-venv/bin/python -m twine check --strict build/dist/*

clean:                        ## deletes the virtual environments, but no runs
	rm -rf $(VENV) .venv-*

# torch is installed first and alone, so that pip can choose a local or platform wheel; later installs keep it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): PyTorch is a download of gigabytes on Linux."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt torch
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[ppo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[ppo,dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[ppo,docs]'
	touch $@
