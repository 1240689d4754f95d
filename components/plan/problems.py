"""What cannot work as requested, and the nearest configurations that work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from steadytrain.components.memory.model import known_models
from steadytrain.components.memory.setting import FP32
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import frozen_problems, trained_parameters
from steadytrain.components.plan.offer import answering_problem, answering_remark
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import power
from steadytrain.components.shared.config.optimizers import DEFAULT
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.components.shared.quantities import duration
from steadytrain.components.sizing.decisions import recipe_of_plan
from steadytrain.components.sizing.fit import Choice, at, fitting, works
from steadytrain.components.sizing.hardware import all_gpus
from steadytrain.components.sizing.learned import learned_otherwise
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.recipe import MEDIUM, learning_rate, rates
from steadytrain.components.sizing.strategy import (
    BILLION,
    LARGEST,
    offloading_options,
    unconstrained_options,
)
from steadytrain.components.sizing.time_cost import by_table, hours, scoring_of


def problems(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield problems with the user's settings, the memory, and the available hardware."""
    gpu = job.machine.gpu
    if not job.has_precision:
        yield (
            f"training.bf16 = true: {gpu.name} has no bfloat16; the nearest setting that "
            "works is training.fp16=true"
        )
    attention = job.config.training.attention
    if attention.startswith("flash") and not (gpu.cuda and gpu.bf16):
        yield (
            f"training.attention = {attention}: its kernels need a GPU of the Ampere generation or "
            f"later, not {gpu.name}; the nearest setting that works is training.attention=sdpa"
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


_ETHERNET: Final = 10e9 / 8
"""Bytes per second of a slow network between nodes: 10 Gbit/s. The real one is not known."""


def remarks(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield the remarks, one sentence each."""
    if job.config.compute.device == "cpu" and job.machine.gpu.cuda:
        yield "compute.device = cpu is unchanged; this plan shows what a GPU would do"
    yield from _prepared(job)
    known = learned_otherwise(job, choice)
    if known is not None:
        yield (
            f"learned: on {job.machine.gpu.name} a run of the configuration as written, without "
            "the plan's precision, adapters and optimizer, starts with a micro-batch of at "
            f"most {known.limit.micro_batch_size}"
        )
    training = job.config.training
    rate, scaled = training.learning_rate, training.lr_scaling != "none"
    low, high, _ = rates(choice.setting.adapter, job.shape.parameters)
    trained = learning_rate(recipe_of_plan(job, choice))
    if (rate is not None or scaled) and not low <= trained <= high and not job.from_scratch:
        by = " by training.lr_scaling" if scaled else ""
        yield (
            f"training.learning_rate = {power(trained)}{by} is outside the rule's {power(low)} to "
            f"{power(high)} for fine-tuning this model; it is unchanged"
        )
    if rate is None and job.config.data.task == "causal_lm" and not job.from_scratch:
        yield (
            f"training.learning_rate: continued pretraining on plain text forgets less at a low "
            f"rate, {power(low)} (rule: learning rate by purpose); set it if that matters"
        )
    yield from _tier(job)
    yield from _one_is_enough(job, choice)
    yield from _scoring(job, choice)
    yield from _slow_network(job, choice)
    landscape = job.config.evaluation.landscape
    if landscape.on:
        passes = landscape.scorings * -(-landscape.records // job.config.evaluation.batch_size)
        yield (
            f"evaluation.landscape: the evaluate step scores {landscape.records} test records "
            f"{landscape.scorings} times: {passes:,} forward passes of evaluation.batch_size "
            f"{job.config.evaluation.batch_size}, more if texts are longer than the model reads, "
            "and one more copy of the weights in memory"
        )
    yield from answering_remark(job, choice)
    share = job.config.training.warmup_steps
    if job.is_set("training.warmup_steps") and share < 1 and not 0.05 <= share <= 0.1:
        yield (
            f"training.warmup_steps = {share:g} is outside the rule's 5 to 10 % of the steps; "
            "it is unchanged"
        )


def _one_is_enough(job: Workload, choice: Choice) -> Iterator[str]:
    """Say that one GPU is enough for adapters of a small model on little data."""
    data, machine = prepared(job.config), job.machine
    if data is None or machine.ranks == 1 or not choice.setting.adapter.freezes:
        return
    examples = data.sides["train"].documents
    if job.shape.parameters < _SMALL_MODEL and examples < _LITTLE_DATA and machine.gpu.cuda:
        yield (
            f"one GPU is enough for adapters of a model below 7 billion parameters on {examples:,} "
            f"examples, below 1 million (rule: one GPU); {machine.ranks} are faster, not better"
        )


_SMALL_MODEL: Final = 7 * 10**9
_LITTLE_DATA: Final = 10**6


def _tier(job: Workload) -> Iterator[str]:
    """Say what a global batch outside of the rule's medium tier means for the learning rate."""
    batch, scaled = job.global_batch, job.config.training.lr_scaling != "none"
    if job.from_scratch or not job.is_set("training.global_batch_size"):
        return
    if MEDIUM[0] <= batch <= MEDIUM[1]:
        return
    tier, end = ("large, above 32", "upper") if batch > MEDIUM[1] else ("small, below 8", "lower")
    more = "" if scaled else ", or training.lr_scaling with training.base_global_batch_size"
    yield (
        f"training.global_batch_size = {batch} is {tier} sequences (rule: batch); it suits the "
        f"{end} end of the rule's learning rates{more}"
    )


def _prepared(job: Workload) -> Iterator[str]:
    """Say what became of the records, if the data are prepared."""
    record = prepared(job.config)
    if record is None or not record.path("card.json").is_file():
        return
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    yield f"the prepared data: {in_one_line(record, card)}"


def _scoring(job: Workload, choice: Choice) -> Iterator[str]:
    """Say how long a curriculum's reference model takes."""
    scoring = scoring_of(job, choice)
    if scoring is None:
        return
    need = f"needs {scoring.memory / 1e9:.1f} GB, and is gone before the first step"
    if scoring.tokens is None:
        yield f"training.curriculum.model {need}; the hours leave out its pass over the rows"
        return
    span = hours(by_table(job, choice).tokens_per_second, scoring.tokens)
    yield (
        f"training.curriculum.model {need}; its pass over the rows takes "
        f"{duration(span.low * 3600)} to {duration(span.high * 3600)} of the hours, once for all "
        "runs with this model and these data"
    )


def _slow_network(job: Workload, choice: Choice) -> Iterator[str]:
    """Suggest compression if exchanging gradients between nodes may take longer than computing.

    A ring sends all gradients twice, less one rank's part (Patarasu and Yuan 2009).
    """
    setting, ranks = choice.setting, choice.setting.ranks
    compressed = job.config.training.gradient_compression.on
    if job.machine.nodes == 1 or not setting.exchanges or compressed:
        return
    sent = 2 * FP32 * trained_parameters(job.shape, setting) * (ranks - 1) / ranks
    tokens = job.global_batch * setting.length
    computing = tokens / by_table(job, choice).tokens_per_second.high
    if sent / _ETHERNET > computing:
        yield (
            f"the nodes exchange {sent / 1e9:.1f} GB of gradients per step: "
            f"{duration(sent / _ETHERNET)} on Ethernet of 10 Gbit/s, and computing takes "
            f"{duration(computing)}; on such a network, training.gradient_compression.kind=bf16 "
            "halves that, and powersgd sends a few percent"
        )


_SHORTEST: Final = 128
_OPENED: Final = (
    "compute.strategy",
    "compute.offload",
    "model.adapter.kind",
    "training.gradient_checkpointing",
    "training.optim",
    "model.adapter.frozen_embeddings",
    "model.adapter.frozen_head",
    "training.micro_batch_size",
)


def remedies(job: Workload, choice: Choice) -> list[str]:
    """Return what would fit, the nearest first; one sentence each."""
    return [
        sentence
        for sentence in (
            _open(job, choice),
            _shorter(job, choice),
            _offloaded(job),
            _smaller_model(job),
            _larger_gpu(job),
            _more_gpus(job),
            _more_nodes(job, choice),
        )
        if sentence
    ]


def opened(job: Workload) -> Workload:
    """Return the job without the settings that only affect what fits."""
    content: dict[str, Any] = job.config.model_dump(exclude_unset=True)
    for field in _OPENED:
        _forget(content, field.split("."))
    return replace(job, config=RunConfig.model_validate(content))


def _forget(content: dict[str, Any], path: list[str]) -> None:
    *sections, last = path
    for section in sections:
        content = content.get(section, {})
    content.pop(last, None)


def _open(job: Workload, choice: Choice) -> str:
    given = [field for field in _OPENED if job.is_set(field)]
    if not given:
        return ""
    freed = opened(job)
    result = fitting(freed, unconstrained_options(freed))
    if not result:
        return ""
    settings, now = _fields(result), _fields(choice)
    changed = {
        name: settings[name]
        for name in settings
        if settings[name] != now[name] and _needed(job, name, settings)
    }
    return f"{_settings(changed)} fits: {_need(result)}"


def _needed(job: Workload, field: str, settings: Mapping[str, object]) -> bool:
    """Return whether to mention it: not if it is open and derived, or has its default."""
    if job.is_set(field):
        return True
    usual = {"training.optim": DEFAULT, "training.micro_batch_size": settings[field]}
    return settings[field] != usual.get(field)


def _fields(choice: Choice) -> dict[str, object]:
    option = choice.option
    chosen = (option.strategy, option.offload, option.adapter, option.recompute, option.optim)
    frozen = (option.frozen_embeddings, option.frozen_head)
    return dict(zip(_OPENED, (*chosen, *frozen, choice.batch.micro_batch_size), strict=True))


def _shorter(job: Workload, choice: Choice) -> str:
    length = choice.setting.length
    while length > _SHORTEST:
        length //= 2
        result = at(job, choice.option, choice.plan.micro_batch_size, length=length)
        if result.fits:
            return f"data.sequence_length={length} fits: {_need(result)}"
    return ""


def _offloaded(job: Workload) -> str:
    choice = fitting(opened(job), offloading_options(job))
    if not choice:
        return ""
    settings = {
        "compute.strategy": choice.option.strategy,
        "compute.offload": choice.option.offload,
        "model.adapter.kind": choice.option.adapter,
    }
    return (
        f"{_settings(settings)} fits: {_need(choice)}, and {choice.memory.host / 1e9:.0f} GB of "
        "host memory per rank; several times slower"
    )


def _smaller_model(job: Workload) -> str:
    """Suggest the largest known model that fits; a model from scratch has no name."""
    if job.from_scratch:
        return ""
    sizes = sorted(
        ((shape_of(config, labels=job.shape.labels), name) for name, config in _alike(job)),
        key=lambda item: -item[0].parameters,
    )
    for shape, name in sizes:
        if shape.parameters >= min(job.shape.parameters, LARGEST):
            continue
        smaller = replace(job, shape=shape, name=name)
        if choice := works(smaller):
            return (
                f"model.base=hub:{name} fits ({shape.parameters / BILLION:.1f} billion "
                f"parameters): {_need(choice)}"
            )
    return ""


def _alike(job: Workload) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, config in known_models().items():
        if config["model_type"] == job.shape.family:
            yield name, config


def _larger_gpu(job: Workload) -> str:
    machine = job.machine
    for gpu in all_gpus():
        larger = job.on(gpu, machine.nodes, machine.per_node)
        if gpu.memory > machine.gpu.memory and (choice := works(larger)):
            return f"--gpu {gpu.name.lower()} fits ({gpu.memory_gb:g} GB): {_need(choice)}"
    return ""


def _more_gpus(job: Workload) -> str:
    machine, per_node = job.machine, job.machine.per_node
    while per_node < 8:
        per_node *= 2
        choice = works(job.on(machine.gpu, machine.nodes, per_node))
        if choice and choice.option.strategy != "single":
            return f"--gpus-per-node {per_node} fits with {choice.option.strategy}: {_need(choice)}"
    return ""


def _more_nodes(job: Workload, choice: Choice) -> str:
    """Suggest more nodes, each of which then needs less host memory."""
    machine, nodes = job.machine, job.machine.nodes
    while not choice.fits_host and nodes < 64:
        nodes *= 2
        if result := works(job.on(machine.gpu, nodes, machine.per_node)):
            return f"--nodes {nodes} fits with {result.option.strategy}: {_need(result)}"
    return ""


def _settings(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_yaml(value)}" for name, value in fields.items())


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _need(found: Choice) -> str:
    adapter = f"{found.option.adapter}, " if found.option.adapter != "none" else ""
    return f"{adapter}{found.memory.total / 1e9:.1f} of {found.capacity / 1e9:g} GB"
