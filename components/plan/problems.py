"""What can't work in a job as requested; one sentence each, with the nearest that works."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.memory.frozen import frozen_problems
from steadytrain.components.plan.answers import answering_problem
from steadytrain.components.sizing.fit import Choice, works
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.scoring import scoring_of


def problems(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield problems with the user's settings, the memory, and the available hardware."""
    gpu = job.machine.gpu
    if not job.has_precision:
        yield (
            f"training.bf16 = true: {gpu.name} has no bfloat16; the nearest setting that "
            "works is training.fp16=true"
        )
    if not job.is_available:
        yield _too_many(job)
    if not choice.fits_gpu:
        yield _too_much(job, choice)
    scoring = scoring_of(job, choice)
    if scoring is not None and scoring.memory > choice.usable:
        yield (
            f"training.curriculum.model needs {scoring.memory / 1e9:.1f} GB to score the rows, and "
            f"{choice.usable / 1e9:.1f} of {gpu.name}'s {gpu.memory_gb:g} GB are usable; use a "
            "smaller model, or a column with its losses (by: column)"
        )
    yield from answering_problem(job, choice)
    yield from frozen_problems(job.shape, choice.setting.adapter)
    if not choice.fits_host:
        yield _too_much_of_the_host(job, choice)
    if choice.setting.length > job.shape.positions:
        yield (
            f"data.sequence_length = {choice.setting.length}: the model takes at most "
            f"{job.shape.positions} tokens; the nearest setting that works is "
            f"data.sequence_length={job.shape.positions}"
        )


def _too_much(job: Workload, choice: Choice) -> str:
    memory, gpu = choice.memory, job.machine.gpu
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    outside = 2 * (job.shape.embeddings + job.shape.head) / 1e9
    kept = (
        f"; embeddings and head stay in 16 bits, {outside:.1f} GB of the weights"
        if choice.option.adapter == "qlora" and not choice.option.lightened
        else ""
    )
    return (
        f"a rank needs {memory.total / 1e9:.1f} GB at its peak ({largest}{kept}), and "
        f"{choice.usable / 1e9:.1f} of {gpu.name}'s {gpu.memory_gb:g} GB are usable"
    )


def _too_much_of_the_host(job: Workload, choice: Choice) -> str:
    capacity, usable = choice.host_capacity or 0, choice.host_usable or 0
    whole = f"its {capacity / 1e9:.1f} GB"
    if job.hosts.of_a_cluster:
        whole = f"the {capacity / 1e9:.1f} GB that a pod can get there"
    return (
        f"a node needs {choice.host_needed / 1e9:.1f} GB of host memory for what is offloaded "
        f"from the GPUs ({job.machine.per_node} x {choice.memory.host / 1e9:.1f}), and "
        f"{usable / 1e9:.1f} of {whole} are usable"
    )


def _too_many(job: Workload) -> str:
    machine, hosts = job.machine, job.hosts
    name, per_node = machine.gpu.name, machine.per_node
    suitable = len(hosts.with_gpus(name, per_node))
    if suitable:
        lacking = f"compute.nodes = {machine.nodes}: the cluster has {suitable}"
        lacking += f" with {per_node} x {name}"
    else:
        most = max(node.gpus for node in hosts.with_gpus(name, 1))
        lacking = f"compute.nproc_per_node = {per_node}: the cluster's nodes have at most {most}"
        lacking += f" x {name}"
    return f"{lacking}; {_nearest(job)}"


def _nearest(job: Workload) -> str:
    """Return the largest number of GPUs of this kind that exists and works."""
    machine = job.machine
    sizes = [
        (nodes, per_node)
        for nodes in range(1, machine.nodes + 1)
        for per_node in range(1, machine.per_node + 1)
    ]
    for nodes, per_node in sorted(sizes, key=lambda size: (-size[0] * size[1], size[0])):
        fewer = job.on(machine.gpu, nodes, per_node)
        if works(fewer):
            return f"the nearest setting that works is {_changed(machine, fewer.machine)}"
    return "no smaller number works"


def _changed(asked: Machine, found: Machine) -> str:
    fields = {
        "compute.nodes": (asked.nodes, found.nodes),
        "compute.nproc_per_node": (asked.per_node, found.per_node),
    }
    return ", ".join(f"{field}={new}" for field, (old, new) in fields.items() if old != new)
