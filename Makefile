# Two commands matter: `make demo` and `make test`. Each sets up everything it needs.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test lint lock setup clean
setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r .ci/tools.lock
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock .ci/tools.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/steadytrain
	ln -sfn ../../../components build/types/steadytrain/components
	ln -sfn ../../../pipelines build/types/steadytrain/pipelines
	MYPYPATH=build/types $(BIN)/mypy --explicit-package-bases --namespace-packages -p steadytrain

lock:
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-annotate --no-header --upgrade \
	  pyproject.toml -o requirements.lock
