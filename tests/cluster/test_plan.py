"""What a plan would have Kubeflow Trainer do, as the cluster's own API server reads it."""

from __future__ import annotations

from typer.testing import CliRunner

from steadytrain.pipelines import cli

from support.namespaces import kubectl, needs_cluster, own_namespace

pytestmark = needs_cluster


def test_a_plans_trainjob_is_accepted(tmp_path):
    arguments = ["plan", "causal-lm", "--gpu", "h100", "--gpus-per-node", "8", "--nodes", "2"]
    told = CliRunner().invoke(cli.app, [*arguments, "--write", str(tmp_path)])
    assert told.exit_code == 0, told.output
    file = tmp_path / "trainjob.yaml"
    with own_namespace("plan") as namespace:
        # For real, since a dry run of the job looks for a runtime that is there.
        made = kubectl("apply", "-n", namespace, "-f", file)
    assert made.count("created") == 2
