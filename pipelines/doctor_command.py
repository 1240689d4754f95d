"""`steadytrain doctor`: of this machine, and with --cluster of a cluster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from steadytrain.pipelines.options import DEFAULT_OUTPUT, Host, Output

Cluster = Annotated[
    bool, typer.Option("--cluster", help="Look at the cluster that kubectl would talk to.")
]
Namespace = Annotated[
    str, typer.Option(help="Where runs work; by default KFP_NAMESPACE or the context's.")
]
Account = Annotated[
    str,
    typer.Option(help="Whose rights to ask for, by impersonation: that of the steps."),
]
Image = Annotated[str, typer.Option(help="Of training; by default that of this version.")]
Storage = Annotated[str, typer.Option(help="An s3:// address to write to and read from.")]


def doctor(
    output: Output = DEFAULT_OUTPUT,
    cluster: Cluster = False,
    namespace: Namespace = "",
    service_account: Account = "",
    image: Image = "",
    storage: Storage = "",
    host: Host = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what this machine offers: versions, memory, disk, tracking, which credentials.

    With --cluster, what the cluster does: rights, kinds of objects, GPUs, quota, volume, image,
    S3, MLflow and Kubeflow Pipelines; each with a remedy where it does not pass. A pod is started
    and removed, as are an object in S3 and an experiment in MLflow. It ends with status 1 where
    something fails.
    """
    if not cluster:
        _this_machine(output, as_json=as_json)
        return
    from steadytrain.components.shared.image import TRAIN_IMAGE
    from steadytrain.pipelines.cluster.doctor import Questions, examine_cluster

    questions = Questions(
        namespace=namespace,
        service_account=service_account,
        image=image or TRAIN_IMAGE,
        storage=storage,
        host=host,
    )
    lines = []
    for line in examine_cluster(questions):
        lines.append(line)
        if not as_json:
            typer.echo(f"{line.state:<9}  {line.topic}: {line.text}")
            if line.remedy:
                typer.echo(f"{'':<11}remedy: {line.remedy}")
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
    if any(line.state == "fail" for line in lines):
        raise typer.Exit(1)


def _this_machine(output: Path, *, as_json: bool) -> None:
    from steadytrain.pipelines.doctor import examine

    findings = examine(output)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    for finding in findings if not as_json else ():
        typer.echo(f"{'ok ' if finding.good else 'BAD'}  {finding.topic}: {finding.text}")
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)
