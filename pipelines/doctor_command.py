"""`steadytrain doctor`: check this machine or, with --cluster, a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DEFAULT_OUTPUT, Host, Output

Cluster = Annotated[
    bool,
    typer.Option(
        "--cluster", help="Check the cluster that kubectl connects to instead of this machine."
    ),
]
Namespace = Annotated[
    str,
    typer.Option(help="Namespace of the runs. Default: KFP_NAMESPACE, or the context's namespace."),
]
Account = Annotated[
    str,
    typer.Option(
        help="Service account of the steps, whose rights to check by impersonation. Default: your "
        "own rights."
    ),
]
Image = Annotated[str, typer.Option(help="Training image. Default: the image of this version.")]
Storage = Annotated[
    str, typer.Option(help="An s3:// address to test by writing and reading. Default: no S3 check.")
]


def doctor(
    output: Output = DEFAULT_OUTPUT,
    cluster: Cluster = False,
    namespace: Namespace = "",
    service_account: Account = "",
    image: Image = "",
    storage: Storage = "",
    host: Host = "",
    as_json: Json = False,
) -> None:
    """Check this machine or, with --cluster, a cluster.

    On this machine: versions, memory, disk, tracking, and credentials. On a cluster: rights, object
    kinds, GPUs, quota, volume, image, S3, MLflow, and Kubeflow Pipelines. Each check that does not
    pass comes with a fix. The checks create and remove a pod, an object in S3, and an experiment in
    MLflow. The exit status is 1 if a check fails.
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
        json_output.show({"checks": [dataclasses.asdict(line) for line in lines]})
    if any(line.state == "fail" for line in lines):
        raise typer.Exit(1)


def _this_machine(output: Path, *, as_json: bool) -> None:
    from steadytrain.pipelines.doctor import examine

    findings = examine(output)
    if as_json:
        json_output.show({"checks": [finding.as_data() for finding in findings]})
    for finding in findings if not as_json else ():
        typer.echo(f"{'ok ' if finding.good else 'BAD'}  {finding.topic}: {finding.text}")
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)
