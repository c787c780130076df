# The habits of this repository. Each target sets up what it needs in $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: imdb imdb-ppo gsm8k gsm8k-ppo test test-slow notebook docs lint clean

imdb: $(VENV)/.installed      ## CORY on IMDB, toy setting: minutes on two CPU cores
	$(RUN) imdb_train/cory.py

imdb-ppo: $(VENV)/.installed  ## its PPO baseline
	$(RUN) imdb_train/ppo.py

gsm8k: $(VENV)/.installed     ## CORY on GSM8K, toy setting
	$(RUN) gsm8k_train/cory.py

gsm8k-ppo: $(VENV)/.installed ## its PPO baseline
	$(RUN) gsm8k_train/ppo.py

test: $(VENV)/.installed-dev  ## the test suite, without the slow tests
	$(RUN) -m pytest

test-slow: $(VENV)/.installed-dev  ## the slow tests: train the toy models again, in minutes
	$(RUN) -m pytest -m slow

notebook: $(VENV)/.installed-dev  ## executes the quick start; an error in a cell is an error; runs/quick_start.ipynb has the outputs
	mkdir -p runs
	OMP_NUM_THREADS=1 $(VENV)/bin/jupyter-execute --timeout=300 --output=../runs/quick_start notebooks/quick_start.ipynb

docs: $(VENV)/.installed-docs  ## the documentation site, into build/site; a warning or a dead link is an error
	$(RUN) docs/site.py

lint: $(VENV)/.installed-dev  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:                        ## forgets the virtual environment, not the runs
	rm -rf $(VENV)

# torch by itself first: it is found where a local or platform wheel is preferred, and the rest then keeps it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt torch
	$(RUN) -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@
