# make run    fetch a real language model, compile it, ask it something     make run ARGS="'Why is the sky blue?'"
# make run-embed   the same for a sentence encoder, compared with the original    make run-titles   for a T5
# make test   the quick tests                  make test ARGS="-k mask"
# make check  lint, format, types, quick tests
# make slow   the slow tests
# make fuzz   mutants of real models           make fuzz SECONDS=3600 SEED=7
# make fmt    rewrite the sources in the project's format
# make clean  remove what the tools left behind (make distclean: the environment too)
#
# The environment is made when it is missing or older than pyproject.toml, or when the checkout was moved.
# VENV=folder puts it elsewhere; PY=python3.12 makes it with another Python (3.11 or newer).

VENV ?= .venv
PY ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
ARGS ?=
SECONDS ?= 600
SEED ?= 0

STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -q $(ARGS)

# The stamp holds the folder that was installed; an environment whose Python is gone, or that belongs to another folder, is stale.
INSTALLED := $(shell test -x '$(BIN)/python' && cat '$(STAMP)' 2>/dev/null)
ifneq ($(INSTALLED),$(CURDIR))
STALE := stale
endif

.DEFAULT_GOAL := run
.PHONY: run run-embed run-titles test slow fuzz check lint fmt clean distclean stale

run: $(STAMP)
	@$(BIN)/python examples/chat.py $(ARGS)

run-embed: $(STAMP)
	@$(BIN)/python examples/sentences.py $(ARGS)

run-titles: $(STAMP)
	@$(BIN)/python examples/titles.py $(ARGS)

test: $(STAMP)
	@$(PYTEST) -n auto --maxprocesses=8 -m "not slow"

# A file's tests run in one process, for many share what is compiled once. pytest answers 5 when no test is marked slow.
slow: $(STAMP)
	@$(PYTEST) -n auto --maxprocesses=8 --dist loadfile -m slow || test $$? -eq 5

fuzz: $(STAMP)
	@$(BIN)/python -m attnc.tests.fuzz.pool --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	@$(MAKE) --no-print-directory test

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml $(STALE)
	@test -n '$(PY)' || { echo 'attnc needs Python 3.11 or newer, and none was found. Name one: make PY=/path/to/python3' >&2; exit 1; }
	@'$(PY)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'attnc needs Python 3.11 or newer; $(PY) is not, or does not run. Name one: make PY=/path/to/python3' >&2; exit 1; }
	@'$(PY)' -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo '$(PY) has no venv module. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@'$(BIN)/python' -c 'import pip' 2>/dev/null || '$(PY)' -m venv --clear '$(VENV)'
	@echo 'Installing attnc and its tools into $(VENV) …'
	@'$(BIN)/python' -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@'$(BIN)/python' -m pip install --quiet --disable-pip-version-check -e '.[tvm]' || \
		echo 'TVM has no package for this machine: the target tvm-cpu is missing, and its tests are skipped'
	@printf '%s' '$(CURDIR)' > '$@'

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf '$(VENV)'
