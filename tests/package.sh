#!/bin/sh
# Builds the wheel, installs it in a fresh environment with what authoring
# needs, and uses it from outside the checkout.
set -eu
bin=$(cd "$1" && pwd)
root=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$bin/python" -m build --quiet --wheel --no-isolation --outdir "$work/dist" "$root"
"$bin/python" -m venv --without-pip "$work/venv"
# The lock file as constraints: the same versions, only those that the wheel asks for.
"$bin/uv" pip install --quiet --python "$work/venv/bin/python" \
  --constraint "$root/requirements.lock" "$work"/dist/*.whl

cd "$work"
python="$work/venv/bin/python"
"$python" - <<'PYTHON'
import importlib.util
import steadytrain.pipelines.dags
from steadytrain.components.shared.config import load, preset_names

assert importlib.util.find_spec("torch") is None, "authoring must not need torch"
assert len(preset_names()) >= 3, preset_names()
for name in preset_names():
    load(name)
PYTHON
"$work/venv/bin/steadytrain" --help > help.txt
"$work/venv/bin/steadytrain" validate causal-lm
"$work/venv/bin/steadytrain" compile --output one.yaml
"$work/venv/bin/steadytrain" compile --output two.yaml
cmp one.yaml two.yaml
echo "package: the wheel installs, imports, compiles and helps on its own"
