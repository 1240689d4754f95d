"""`steadytrain doctor`: check this machine or, with --cluster, a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.batch import MOST_GPUS
from steadytrain.pipelines import options
from steadytrain.pipelines.options import DEFAULT_OUTPUT, Host, Json, Output, amount

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig

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
StepImage = Annotated[
    str,
    typer.Option(help="Image of the steps that do not train. Default: the image of this version."),
]
Storage = Annotated[
    str, typer.Option(help="An s3:// address to test by writing and reading. Default: no S3 check.")
]


def doctor(
    source: Annotated[
        str,
        typer.Argument(
            help="A configuration, preset or data. Its hub: addresses must be reachable here; with "
            "--cluster, a node must be able to hold its training pods."
        ),
    ] = "",
    output: Output = DEFAULT_OUTPUT,
    cluster: Cluster = False,
    namespace: Namespace = "",
    service_account: Account = "",
    image: Image = "",
    step_image: StepImage = "",
    storage: Storage = "",
    host: Host = "",
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Check on this machine what ranks exchange, instead of the rest: latency and "
            "bandwidth of an all-reduce, and which rank hangs if one does.",
        ),
    ] = False,
    ranks: Annotated[
        int,
        amount(
            "Ranks on each node of that check. Default: one for each GPU, or those of the "
            "configuration; on this machine 2 at least.",
            64,
        ),
    ] = 0,
    nodes: Annotated[
        int,
        amount(
            "With --cluster: the same check as a TrainJob with so many pods. Default: none.",
            MOST_GPUS,
        ),
    ] = 0,
    probe_seconds: Annotated[
        float,
        typer.Option(
            min=1, max=600, help="Time limit of that check, without the wait for pods on a cluster."
        ),
    ] = 120,
    as_json: Json = False,
) -> None:
    """Check this machine or, with --cluster, a cluster.

    On this machine: versions, memory, disk, compiler, tracking, the hub, and credentials. On a
    cluster: rights, object kinds, GPUs, quota, volume, the size of a run's pods, both images, S3,
    MLflow, and Kubeflow Pipelines. It waits until the Deployments of the manifests have started.
    Each check that does not pass comes with a fix. The checks create and remove pods, an object in
    S3, and an experiment in MLflow. The exit status is 1 if a check fails.

    For example: `steadytrain doctor --distributed --ranks 4` or `steadytrain doctor --cluster
    --nodes 2 --ranks 8`
    """
    _check_probe(distributed=distributed, cluster=cluster, ranks=ranks, nodes=nodes)
    if distributed:
        _distributed(source, ranks, probe_seconds, as_json=as_json)
        return
    if not cluster:
        _this_machine(source, output, as_json=as_json)
        return
    from steadytrain.components.shared.environment import STEP_IMAGE, TRAIN_IMAGE
    from steadytrain.pipelines.cluster.doctor import Questions, examine_cluster

    questions = Questions(
        namespace=namespace,
        service_account=service_account,
        image=image or TRAIN_IMAGE,
        step_image=step_image or STEP_IMAGE,
        compute=_configuration(source).compute if source else None,
        storage=storage,
        host=host,
        nodes=nodes,
        ranks=ranks,
        probe_seconds=probe_seconds,
    )
    lines = []
    for line in examine_cluster(questions):
        lines.append(line)
        if not as_json:
            typer.echo(f"{line.state:<9}  {line.topic}: {line.text}")
            if line.remedy:
                typer.echo(f"{'':<11}fix: {line.remedy}")
    if as_json:
        options.show({"checks": [dataclasses.asdict(line) for line in lines]})
    if any(line.state == "fail" for line in lines):
        raise typer.Exit(1)


def _check_probe(*, distributed: bool, cluster: bool, ranks: int, nodes: int) -> None:
    """Reject options of the check of ranks that contradict each other, or that nothing reads.

    Raises:
        BadInput: there is one.
    """
    if distributed and cluster:
        raise BadInput("--distributed is for this machine", remedy="with --cluster, give --nodes")
    if nodes and not cluster:
        raise BadInput("--nodes needs --cluster", remedy="for this machine, give --distributed")
    if ranks and not (distributed or nodes):
        raise BadInput("--ranks: nothing starts ranks", remedy="add --distributed or --nodes")


def _distributed(source: str, ranks: int, seconds: float, *, as_json: bool) -> None:
    """Check what ranks of this machine exchange."""
    options.check_extra("train", "steadytrain doctor --distributed")
    from steadytrain.components.train.launch.collectives import judged, run_here
    from steadytrain.pipelines.doctor import read_gpus

    compute = _configuration(source).compute if source else None
    seen = read_gpus()
    own = compute.nproc_per_node if compute else len(seen.gpus) if seen else 0
    count = ranks or max(2, own)
    variables = compute.nccl if compute else {}
    verdict = judged(run_here(count, seconds, variables=variables), count, seconds)
    if as_json:
        check = {"topic": "collectives", "state": "pass" if verdict.good else "fail"}
        options.show({"checks": [{**check, "text": verdict.text, "remedy": verdict.remedy}]})
    else:
        typer.echo(f"{'ok ' if verdict.good else 'BAD'}  collectives: {verdict.text}")
        if verdict.remedy:
            typer.echo(f"{'':<5}fix: {verdict.remedy}")
    if not verdict.good:
        raise typer.Exit(1)


def _configuration(source: str) -> RunConfig:
    from steadytrain.pipelines.sources import open_source

    return open_source(source, []).config


def _this_machine(source: str, output: Path, *, as_json: bool) -> None:
    from steadytrain.pipelines.doctor import examine

    findings = examine(output, _configuration(source) if source else None)
    if as_json:
        options.show({"checks": [finding.as_data() for finding in findings]})
    for finding in findings if not as_json else ():
        typer.echo(f"{'ok ' if finding.good else 'BAD'}  {finding.topic}: {finding.text}")
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)
