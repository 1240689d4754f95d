"""The images as administrators run them: any user, only /tmp writable, no network."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from steadytrain.components.shared.environment import STEP_IMAGE, TRAIN_IMAGE

from support.command import TINY_LM
from support.liger import COMPARE as LIGER

LOCK = Path(__file__).parents[2] / "requirements.lock"
MEGABYTE = 1_000_000
RESTRICTED = [
    "--rm",
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp:exec,mode=1777",
    "--cap-drop=ALL",
    "--user=4711",
    "--env=HOME=/nonexistent",
    "--entrypoint=",
]
IMAGES = pytest.mark.parametrize("image", [STEP_IMAGE, TRAIN_IMAGE])
LAUNCHER = """
import re, subprocess
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

# A driver without a GPU: every function that Triton links to, which then succeeds.
source = Path(driver.dirname, "driver.c").read_text()
names = sorted(set(re.findall(r"cu[A-Z][A-Za-z0-9_]*(?= *[(])", source)))
Path("/tmp/cuda.c").write_text("".join(f"int {name}(void) {{ return 0; }}\\n" for name in names))
subprocess.run(["gcc", "-shared", "-fPIC", "-o", "/tmp/libcuda.so.1", "/tmp/cuda.c"], check=True)
driver.CudaUtils()

@triton.jit
def add(x, y, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(x + at) + 1.0)

source = ASTSource(add, {"x": "*fp32", "y": "*fp32", "n": "constexpr"}, {"n": 16})
built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print("cubin" in built.asm)
"""
INDUCTOR = """
import torch

torch.manual_seed(0)
layer = torch.nn.Linear(8, 8)
given = torch.randn(4, 8)
compiled = torch.compile(lambda x: torch.nn.functional.gelu(layer(x)).sum())
torch.testing.assert_close(compiled(given), torch.nn.functional.gelu(layer(given)).sum())
compiled(given).backward()
print(len(layer.weight.grad))
"""
DEEPSPEED = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

weight = torch.nn.Parameter(torch.ones(64))
optimizer = DeepSpeedCPUAdam([weight], lr=0.1)
weight.grad = torch.ones(64)
optimizer.step()
print(round(float(weight[0]), 4))
"""
INSTALLED = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.name: d.version for d in m.distributions(path=[p])}))"
)


@pytest.fixture(scope="module", autouse=True)
def built():
    if shutil.which("docker") is None or subprocess.run(["docker", "info"]).returncode:
        pytest.skip("needs docker, with its daemon")
    found = docker("images", "--quiet", STEP_IMAGE), docker("images", "--quiet", TRAIN_IMAGE)
    if not all(found):
        pytest.skip("the images are not built: make images")


def docker(*arguments):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(image, *command):
    return docker("run", *RESTRICTED, image, *command)


def tiny(step, *more):
    sets = " ".join(f"--set '{item}'" for item in (*TINY_LM, "output=/tmp/output", *more))
    return f"steadytrain step {step} causal-lm {sets}"


def test_light_image_preprocesses():
    # On a cluster, the step reports to a tracking server (see test_pipeline.py).
    given = tiny("preprocess", "tracking.uri=file:/tmp/tracked")
    command = f"MLFLOW_ALLOW_FILE_STORE=1 {given} --json"
    (record,) = json.loads(run(STEP_IMAGE, "sh", "-c", command))["records"].values()
    assert record["sides"].keys() == {"train", "validation", "test"}


def test_light_image_reports_that_it_needs_a_tracking_server():
    said = run(STEP_IMAGE, "sh", "-c", f"{tiny('preprocess')} 2>&1 || true")
    assert "SQLAlchemy is not installed" in said
    assert "the address of an MLflow server" in said


def test_both_images_have_the_same_standard_library():
    library = "find \"$(python3 -c 'import os; print(os.path.dirname(os.__file__))')\" -name '*.py'"
    command = (
        f"{library} -not -path '*-packages/*' -not -path '*/config-*' -exec sha256sum {{}} + | sort"
    )
    light, full = (run(image, "sh", "-c", command) for image in (STEP_IMAGE, TRAIN_IMAGE))
    assert len(light.splitlines()) > 500
    assert light == full


def test_training_image_trains():
    told = run(TRAIN_IMAGE, "sh", "-ec", f"{tiny('preprocess')} > /dev/null; {tiny('train')}")
    assert json.loads(told)["outcome"] == "finished"


def test_training_image_has_what_compiles_kernels():
    said = run(TRAIN_IMAGE, "python", "-m", "steadytrain.components.shared.toolchain")
    assert said == "\n"


@pytest.mark.parametrize(
    ("code", "environment", "prints"),
    [
        (LAUNCHER, {"LD_LIBRARY_PATH": "/tmp"}, "True"),
        (LIGER, {"TRITON_INTERPRET": "1"}, "equal True"),
        (INDUCTOR, {}, "8"),
        (DEEPSPEED, {"DS_ACCELERATOR": "cpu"}, "0.9"),
    ],
    ids=["launcher-for-a-dummy-driver", "liger-interpreted", "inductor-on-cpu", "deepspeed-on-cpu"],
)
def test_training_image_compiles_kernels_without_a_gpu(code, environment, prints):
    given = [f"--env={name}={value}" for name, value in environment.items()]
    # In a file, since Triton reads a kernel's source.
    command = 'printf %s "$0" > /tmp/code.py && python /tmp/code.py'
    said = docker("run", *given, *RESTRICTED, TRAIN_IMAGE, "sh", "-c", command, code)
    assert said.strip().splitlines()[-1] == prints


def test_light_image_is_light():
    with subprocess.Popen(["docker", "save", STEP_IMAGE], stdout=subprocess.PIPE) as saving:
        counted = Counted()
        with gzip.GzipFile(fileobj=counted, mode="wb", compresslevel=6) as packed:
            shutil.copyfileobj(saving.stdout, packed, MEGABYTE)
    assert saving.returncode == 0
    # A base with Debian's Python has its newest release beside an earlier one.
    twice = run(STEP_IMAGE, "sh", "-c", "test -x /usr/bin/python3 && echo 12 || echo 0")
    assert counted.size < (210 + int(twice)) * MEGABYTE
    spec = "import importlib.util as u; print(u.find_spec('torch'))"
    assert run(STEP_IMAGE, "python", "-c", spec) == "None\n"


class Counted:
    """A file object that only counts the bytes written to it."""

    size = 0

    def write(self, content):
        self.size += len(content)
        return len(content)

    def flush(self):
        pass


@IMAGES
def test_installed_packages_match_the_lock_file(image):
    locked = set(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", LOCK.read_text(), re.MULTILINE))
    code = f"import sysconfig; p = sysconfig.get_path('purelib'); {INSTALLED}"
    installed = json.loads(run(image, "python", "-c", code))
    assert installed.pop("steadytrain") == version("steadytrain")
    normal = {(re.sub(r"[-_.]+", "-", name).lower(), at) for name, at in installed.items()}
    assert normal <= locked
    assert len(normal) > 50


@IMAGES
def test_image_has_labels_and_runs_as_any_user(image):
    (found,) = json.loads(docker("inspect", image))
    settings = found["Config"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", settings["User"])
    labels = {key.rpartition(".")[2]: value for key, value in settings["Labels"].items()}
    assert labels["version"] == version("steadytrain")
    assert labels["title"] == image.partition(":")[0]
    assert re.fullmatch(r"[0-9a-f]{40}", labels["revision"])


@IMAGES
def test_nothing_of_the_builder_is_left(image):
    (found,) = json.loads(docker("inspect", image))
    told = json.dumps(found["Config"]) + docker("history", "--no-trunc", image)
    assert not re.search(r"(?i)index_url|default_index|token|password|secret", told)
