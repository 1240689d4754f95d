"""The compiled pipeline gives the weights and the records of `steadytrain run`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.components.shared.config import load, to_parameters
from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.compile import compile_pipeline

from support import kfp_local
from support.command import COMPILED, TINY_LM

OWN = {
    "seconds",
    "model",
    "run_id",
    "model_uri",
    "folder",
    "mlflow_run_id",
    "version",
    "reason",
    "scores",
}


def records(run):
    """Return a run's records without what differs between any two runs."""

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name not in OWN}
        return value.replace(str(run.parents[1]), "") if isinstance(value, str) else value

    return {path.stem: plain(json.loads(path.read_text())) for path in run.glob("records/*.json")}


@pytest.mark.long
@pytest.mark.parametrize("fuse", [False, True], ids=["steps", "fused"])
def test_compiled_pipeline_gives_what_a_local_run_gives(steadytrain, tmp_path, fuse):
    """It has two ranks. A run leaves nothing in TMPDIR."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ranks = "compute.nproc_per_node=2"
    done = steadytrain.run("causal-lm", *TINY_LM, ranks, TMPDIR=str(scratch))
    assert done.code == 0, done.err
    assert {path.name for path in scratch.iterdir()} <= {COMPILED}
    (run,) = done.runs

    output = tmp_path / "compiled"
    config = load("causal-lm", [*TINY_LM, ranks, f"output={output}"])
    shape = PipelineConfig(fuse=fuse)
    pipeline = compile_pipeline(tmp_path / "pipeline.yaml", shape=shape)
    parameters = tmp_path / "parameters.json"
    parameters.write_text(json.dumps(to_parameters(config, run=run.name)))
    program = [sys.executable, kfp_local.__file__, pipeline, parameters, tmp_path / "kfp"]
    environment = steadytrain.environment()
    ran = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout[-3000:]
    executed = {path.name for path in (tmp_path / "kfp").glob("*/*")}
    after = ["evaluate-and-register"] if fuse else ["evaluate", "register", "promote"]
    assert executed >= {"preprocess", "train", *after, "report"}

    ours, compiled = records(run), records(Workspace(output, run.name).folder)
    assert ours["promote"]["champion"]
    for name in ours:
        assert compiled[name] == ours[name]
    assert compiled.keys() == ours.keys()
