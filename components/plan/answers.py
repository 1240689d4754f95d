"""What storing a teacher's answers takes: one pass over the training rows, before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from steadytrain.components.memory.companion import answering_teacher
from steadytrain.components.memory.peak import CUDA_CONTEXT
from steadytrain.components.shared.chunks import answer_bytes, answered_rows
from steadytrain.components.shared.quantities import duration, size
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.scoring import pass_tokens
from steadytrain.components.sizing.time_cost import by_table, hours


@dataclass(frozen=True)
class Answering:
    """The pass.

    disk: bytes for each target. memory: of the device, while the student is not there yet.
    tokens: of training that take as long; None if the data are not prepared yet. targets: the same.
    """

    disk: int
    memory: int
    tokens: float | None
    targets: int | None


def answering(job: Workload, choice: Choice) -> Answering | None:
    """Return what the pass takes; None if no answers are stored.

    Raises:
        BadInput: the teacher's architecture is unknown.
    """
    config, setting = job.config, choice.setting
    distillation, data = config.training.distillation, prepared(job.config)
    if not distillation.stored:
        return None
    teacher = answering_teacher(config, half=setting.half, length=setting.length)
    tokens = answered_rows(setting.length) * setting.length
    side = None if data is None else data.sides["train"]
    return Answering(
        answer_bytes(distillation.top_k or 0),
        teacher.alone(tokens) + (CUDA_CONTEXT if setting.cuda else 0),
        pass_tokens(job, setting, teacher),
        None if side is None else side.target_tokens or side.rows,
    )


def answering_remark(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield a sentence about the pass, if there is one."""
    found = answering(job, choice)
    if found is None:
        return
    takes = f"{size(found.disk * 1e6)} of disk for each million targets"
    if found.tokens is not None and found.targets is not None:
        span = hours(by_table(job, choice).tokens_per_second, found.tokens)
        takes = (
            f"{duration(span.low * 3600)} to {duration(span.high * 3600)} of the hours and "
            f"{size(found.disk * found.targets)} of disk beside the data"
        )
    yield (
        f"training.distillation.top_k = {job.config.training.distillation.top_k}: before the first "
        f"step, the teacher answers each training row once, which takes {takes}; it needs "
        f"{size(found.memory)} of device memory then, and none afterwards"
    )


def answering_problem(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield a sentence if the teacher does not fit on the device."""
    found = answering(job, choice)
    if found is not None and found.memory > choice.usable:
        yield (
            f"training.distillation.teacher needs {size(found.memory)} of device memory to answer "
            f"the training rows, and {size(choice.usable)} of {job.machine.gpu.name} are usable; "
            "use a smaller teacher or a larger GPU"
        )
