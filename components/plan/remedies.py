"""The nearest configurations that work, if the requested one does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from steadytrain.components.memory.architectures import known_models
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.optimizers import DEFAULT
from steadytrain.components.sizing.fit import Choice, at, fitting, works
from steadytrain.components.sizing.hardware import all_gpus
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.strategy import (
    BILLION,
    LARGEST,
    offloading_options,
    unconstrained_options,
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
    given = [field for field in _OPENED if job.given(field)]
    if not given:
        return ""
    freed = opened(job)
    found = fitting(freed, unconstrained_options(freed))
    if not found:
        return ""
    settings, now = _fields(found), _fields(choice)
    changed = {
        name: settings[name]
        for name in settings
        if settings[name] != now[name] and _needed(job, name, settings)
    }
    return f"{_settings(changed)} fits: {_need(found)}"


def _needed(job: Workload, field: str, settings: Mapping[str, object]) -> bool:
    """Return whether to mention it: not if it is open and derived, or has its default."""
    if job.given(field):
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
        found = at(job, choice.option, choice.plan.micro_batch_size, length=length)
        if found.fits:
            return f"data.sequence_length={length} fits: {_need(found)}"
    return ""


def _offloaded(job: Workload) -> str:
    found = fitting(opened(job), offloading_options(job))
    if not found:
        return ""
    settings = {
        "compute.strategy": found.option.strategy,
        "compute.offload": found.option.offload,
        "model.adapter.kind": found.option.adapter,
    }
    return (
        f"{_settings(settings)} fits: {_need(found)}, and {found.memory.host / 1e9:.0f} GB of "
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
        if found := works(smaller):
            return (
                f"model.base=hub:{name} fits ({shape.parameters / BILLION:.1f} billion "
                f"parameters): {_need(found)}"
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
        if gpu.memory > machine.gpu.memory and (found := works(larger)):
            return f"--gpu {gpu.name.lower()} fits ({gpu.memory_gb:g} GB): {_need(found)}"
    return ""


def _more_gpus(job: Workload) -> str:
    machine, per_node = job.machine, job.machine.per_node
    while per_node < 8:
        per_node *= 2
        found = works(job.on(machine.gpu, machine.nodes, per_node))
        if found and found.option.strategy != "single":
            return f"--gpus-per-node {per_node} fits with {found.option.strategy}: {_need(found)}"
    return ""


def _more_nodes(job: Workload, choice: Choice) -> str:
    """Suggest more nodes, each of which then needs less host memory."""
    machine, nodes = job.machine, job.machine.nodes
    while not choice.fits_host and nodes < 64:
        nodes *= 2
        if found := works(job.on(machine.gpu, nodes, machine.per_node)):
            return f"--nodes {nodes} fits with {found.option.strategy}: {_need(found)}"
    return ""


def _settings(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_yaml(value)}" for name, value in fields.items())


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _need(found: Choice) -> str:
    adapter = f"{found.option.adapter}, " if found.option.adapter != "none" else ""
    return f"{adapter}{found.memory.total / 1e9:.1f} of {found.capacity / 1e9:g} GB"
