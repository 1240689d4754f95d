# Two commands matter, `make demo` and `make test`; each sets up everything it needs.
PYTHON ?= python3.11
BIN := .venv/bin
SET ?=
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DOCKER ?= docker
# Such as --network host, or --build-arg TORCH_INDEX=... for CPU builds of torch.
DOCKER_FLAGS ?=
# Another base image than the Dockerfile's, by digest. ALLOW_UNPINNED_BASE=1 takes one by its tag.
BASE ?=
ALLOW_UNPINNED_BASE ?=

export OMP_NUM_THREADS ?= 2
# Nothing is fetched from a model hub at run time.
export HF_HUB_OFFLINE ?= 1
# Without bytecode each of the hundreds of processes compiles torch and kfp anew: twice the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test cluster lint images bench soak package lock setup clean

demo: setup ## Train, judge and register a real model on real data, on this machine.
	$(BIN)/steadytrain run causal-lm $(foreach item,$(SET),--set $(item))

test: setup lint package ## Everything that is promised of a change.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal --cov --cov-report= tests/unit
	$(BIN)/coverage report --include 'components/*' --fail-under 90 --format total
	# Without coverage, which slows the start of a process by a third.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder tests/end_to_end
	@if [ -n "$$KUBECONFIG" ]; then $(MAKE) cluster; \
	else echo "tests/cluster: skipped, since KUBECONFIG names no cluster"; fi

cluster: setup ## The tests on the cluster that KUBECONFIG names, whose nodes have the images.
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs --durations 20 tests/cluster

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/steadytrain
	ln -sfn ../../../components build/types/steadytrain/components
	ln -sfn ../../../pipelines build/types/steadytrain/pipelines
	$(BIN)/hadolint docker/Dockerfile
	MYPYPATH=build/types $(BIN)/mypy --explicit-package-bases --namespace-packages -p steadytrain

images: ## The two container images, under the names that the pipeline asks for.
	@case "$(BASE)$(filter BASE=%,$(DOCKER_FLAGS))$(if $(ALLOW_UNPINNED_BASE),@sha256:)" in "" | *@sha256:*) ;; *) \
	  echo "BASE=$(BASE) names no digest, so that another image could take its place;" \
	    "give NAME@sha256:DIGEST, or ALLOW_UNPINNED_BASE=1 for a trial" >&2; exit 1;; esac
	for target in step train; do \
	  $(DOCKER) build $(DOCKER_FLAGS) --file docker/Dockerfile --target $$target \
	    --build-arg PIP_INDEX_URL --build-arg UV_DEFAULT_INDEX \
	    $(if $(BASE),--build-arg BASE=$(BASE)) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION="$$(git rev-parse HEAD)" \
	    --tag steadytrain/$$target:$(VERSION) . || exit 1; \
	done

package: setup ## The wheel, in a fresh environment, away from the checkout.
	sh tests/package.sh $(BIN)

bench: setup
	$(BIN)/pytest -m bench -s tests/bench

soak: setup ## A fault each minute for half an hour, and again with memory that runs out.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s tests/end_to_end/test_soak.py

setup: .venv/.installed

.venv/.installed: requirements.lock .ci/tools.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r .ci/tools.lock
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock .ci/tools.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	touch $@

lock: setup ## Resolve the dependencies anew, with hashes, for every platform.
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-annotate --no-header --upgrade \
	  pyproject.toml -o requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .coverage* .mypy_cache .pytest_cache .ruff_cache
