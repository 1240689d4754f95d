"""What a curriculum's reference model adds to a run: one forward pass over the training rows."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.components.memory.companion import grader_of
from steadytrain.components.memory.setting import Companion, Setting
from steadytrain.components.shared.chunks import SCORED_TOKENS
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.time_cost import flops_per_token


@dataclass(frozen=True)
class Scoring:
    """The pass before the first step.

    memory: bytes of a rank at its peak. The model that trains does not exist yet.
    tokens: of training that take as long; None if the data are not prepared.
    """

    memory: int
    tokens: float | None


def scoring_of(job: Workload, choice: Choice) -> Scoring | None:
    """Return what the pass needs; None without a curriculum by loss.

    Raises:
        BadInput: the reference model's architecture is unknown, or can't be built here.
    """
    setting = choice.setting
    found = grader_of(job.config, half=setting.half, length=setting.length)
    if found is None:
        return None
    rows = max(SCORED_TOKENS, setting.length)
    return Scoring(found.alone(rows), pass_tokens(job, setting, found))


def pass_tokens(job: Workload, setting: Setting, model: Companion) -> float | None:
    """Return the tokens of training that take as long as the model's pass over the training rows.

    None if the data are not prepared.
    """
    data = prepared(job.config)
    if data is None:
        return None
    side = data.sides["train"]
    tokens = side.tokens or side.rows * setting.length
    return tokens * model.flops / flops_per_token(job.shape, setting)
