# The two main commands are `make demo` and `make test`. Each sets up everything it needs.
# The first of these that runs; PYTHON=... selects another.
PYTHON ?= $(firstword $(foreach version,3.11 3.12 3.13,\
  $(shell python$(version) -c "" 2>/dev/null && echo python$(version))))
BIN := .venv/bin
SET ?=
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DOCKER ?= docker
# IMAGES=train-keras builds the one for `model.framework: tensorflow` and `jax`.
IMAGES ?= step train
# For example --network host, or --build-arg TORCH_INDEX=... for CPU builds of torch.
DOCKER_FLAGS ?=
# A base image other than the Dockerfile's, by digest. ALLOW_UNPINNED_BASE=1 also allows a tag.
BASE ?=
ALLOW_UNPINNED_BASE ?=
# Tells the images with the example package from the product's. Nothing is pushed there.
PLUGIN_REGISTRY ?= plugins.test
# The tests that a change must pass, as in pyproject.toml. In them, `slow` parts the two commands.
TIMELY := not long and not soak and not bench and not gpu

LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-emit-find-links --no-annotate --no-header --upgrade pyproject.toml

# One more than there are cores, since some tests wait. Each takes 2.5 GB of memory.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))

export OMP_NUM_THREADS ?= 2
# Fetch nothing from a model hub at run time.
export HF_HUB_OFFLINE ?= 1
# Without bytecode, hundreds of processes each compile torch and kfp again and take twice as long.
unexport PYTHONDONTWRITEBYTECODE
# It reaches steadytrain as an option. As an unknown variable, its value would count as a secret.
unexport SET

.PHONY: demo demo-automl test test-all long coverage tensorflow trainer-apis cluster lint docs images plugins bench soak package monitoring \
  lock setup clean

demo: setup ## Train, evaluate and register a real model on real data, on this machine.
	$(BIN)/steadytrain run causal-lm $(foreach item,$(SET),--set $(item))

demo-automl: setup ## Find the best model of a real table, train it and judge it, on this machine.
	$(BIN)/steadytrain automl vote $(foreach item,$(SET),--set $(item))

test: setup ## Lint, what runs in one process, and one end-to-end test for each class of failure.
	$(MAKE) --jobs 3 --output-sync lint docs package
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and $(TIMELY)" -n $(WORKERS) \
	  --dist worksteal tests/end_to_end tests/unit

test-all: test ## The other tests too: everything that a change must pass.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and $(TIMELY)" -n 4 --dist loadfile \
	  --no-loadscope-reorder tests/end_to_end tests/unit
	$(MAKE) --jobs 2 --output-sync tensorflow trainer-apis
	@if [ -n "$$KUBECONFIG" ]; then $(MAKE) cluster; \
	else echo "tests/cluster: skipped, since KUBECONFIG names no cluster"; fi

tensorflow: .venv-tensorflow/.installed ## The tests of Keras again, with TensorFlow.
	OMP_NUM_THREADS=1 .venv-tensorflow/bin/pytest -m "$(TIMELY)" tests/unit/tabular/test_keras.py
	OMP_NUM_THREADS=1 .venv-tensorflow/bin/pytest -m long tests/end_to_end/test_keras.py

# The last releases of each version of Kubeflow Trainer.
TRAINER_APIS = 2.0.1 2.1.0 2.2.1 2.3.0

trainer-apis: setup ## Check the manifests with the API models of each version of Kubeflow Trainer.
	for version in $(TRAINER_APIS); do test -d .trainer-apis/$$version || \
	  $(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python \
	  --target .trainer-apis/$$version kubeflow-trainer-api==$$version || exit 1; done
	$(BIN)/pytest tests/unit/train_launch/test_trainer_versions.py

cluster: setup ## Run the tests on KUBECONFIG's cluster, whose nodes must have the images.
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs --durations 20 tests/cluster

long: setup ## Repeat on many cases what the tests show on few. Continuous integration does.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m long -n 2 --dist worksteal tests/unit tests/end_to_end

coverage: setup ## Measure what the unit tests cover, which makes them half as slow again.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal --cov --cov-report= tests/unit
	$(BIN)/coverage report --include 'components/*' --fail-under 90 --format total

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose.py
	$(BIN)/hadolint docker/Dockerfile tests/plugins/Dockerfile
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

docs: setup ## Build the documentation and the reference in build/site; a broken link fails it.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

images: ## Build the container images, with the names that the pipeline uses.
	@case "$(BASE)$(filter BASE=%,$(DOCKER_FLAGS))$(if $(ALLOW_UNPINNED_BASE),@sha256:)" in "" | *@sha256:*) ;; *) \
	  echo "BASE=$(BASE) names no digest, so another image could replace it;" \
	    "give NAME@sha256:DIGEST, or ALLOW_UNPINNED_BASE=1 for a trial" >&2; exit 1;; esac
	for target in $(IMAGES); do \
	  $(DOCKER) build $(DOCKER_FLAGS) --file docker/Dockerfile --target $$target \
	    --build-arg PIP_INDEX_URL --build-arg UV_DEFAULT_INDEX \
	    $(if $(BASE),--build-arg BASE=$(BASE)) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION="$$(git rev-parse HEAD)" \
	    --tag $(if $(STEADYTRAIN_REGISTRY),$(STEADYTRAIN_REGISTRY)/)steadytrain/$$target:$(VERSION) \
	    . || exit 1; \
	done

plugins: setup ## Add the example package of tests/plugins to both images, for tests/cluster.
	rm -rf build/plugins
	$(BIN)/python -m pip install --quiet --no-index --no-deps --no-build-isolation \
	  --target build/plugins/site tests/plugins
	for target in step train; do \
	  $(DOCKER) build $(DOCKER_FLAGS) --file tests/plugins/Dockerfile \
	    --build-arg BASE=steadytrain/$$target:$(VERSION) \
	    --tag $(PLUGIN_REGISTRY)/steadytrain/$$target:$(VERSION) build/plugins || exit 1; \
	done

package: setup ## Test the wheel in a fresh environment, outside the checkout.
	sh tests/package.sh $(BIN)

bench: setup
	$(BIN)/pytest -m bench -s tests/bench

soak: setup ## Inject faults for half an hour, again while memory runs out, and into studies; sample techniques.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s tests/end_to_end/test_soak.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s tests/end_to_end/test_tune.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s -o timeout=5000 tests/end_to_end/test_combinations.py

monitoring: setup ## Write the alert rules and the dashboards again, after a change in components/observe.
	$(BIN)/python -m steadytrain.components.observe.dashboards manifests/components/monitoring

setup: .venv/.installed

.venv/.installed: requirements.lock .ci/tools.lock pyproject.toml
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
	  { echo "steadytrain needs Python 3.11, 3.12 or 3.13; set PYTHON to its command" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r .ci/tools.lock
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock .ci/tools.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	touch $@

.venv-tensorflow/.installed: .venv/.installed tensorflow.lock pyproject.toml
	test -x .venv-tensorflow/bin/python || \
	  $(BIN)/uv venv --quiet --python $(BIN)/python .venv-tensorflow
	$(BIN)/uv pip sync --quiet --python .venv-tensorflow/bin/python --require-hashes tensorflow.lock
	$(BIN)/uv pip install --quiet --python .venv-tensorflow/bin/python --no-build-isolation --no-deps \
	  --editable .
	touch $@

lock: setup ## Resolve the dependencies again, with hashes, for every platform.
	$(LOCK) $(addprefix --extra ,bench dev lm-eval) -o requirements.lock
	$(LOCK) --extra tensorflow --group tests --constraint requirements.lock -o tensorflow.lock

clean:
	rm -rf .venv .venv-tensorflow .trainer-apis build dist .coverage* .mypy_cache .pytest_cache .ruff_cache
