"""One optimizer step over one global batch, on all ranks alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.tasks.base import Batch
from steadytrain.components.train.loop.control import OUTCOMES
from steadytrain.components.train.loop.data import micro_batches, share
from steadytrain.components.train.loop.errors import Diverged
from steadytrain.components.train.loop.setup import Parts
from steadytrain.components.train.plan.batch import batch_at


@dataclass(frozen=True)
class Share:
    """This rank's part of a global batch.

    tokens: cost of its rows, in the task's units.
    places: of tokens in its micro-batches, padding included.
    """

    batches: list[Batch]
    tokens: int
    places: int


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before they begin a step.

    weight: targets of the whole global batch.
    tokens: cost of its rows.
    places: of tokens, padding included.
    stop: outcome to leave with, or None to go on.
    unsaved: a rank has failed to write its part of a checkpoint.
    due: a checkpoint is to be saved after the step.
    """

    weight: int
    tokens: int
    places: int
    stop: AttemptOutcome | None
    unsaved: bool = False
    due: bool = False


@dataclass(frozen=True)
class StepResult:
    """loss: sum over the global batch. overflow: the scaler skipped the step."""

    loss: float
    grad_norm: float
    learning_rate: float
    overflow: bool


def take_share(parts: Parts, step: int) -> Share:
    """This rank's micro-batches of the global batch of `step`, on the CPU."""
    size = parts.config.training.global_batch_size
    position = batch_at(step, parts.skipped_batches) * size
    indices = share(parts.order.take(position, size), parts.rank, parts.world_size)
    rows = [parts.train[index] for index in indices]
    batches = [parts.task.collate(part) for part in micro_batches(rows, parts.micro_batch_size)]
    tokens = sum(map(parts.task.cost, rows))
    padded = getattr(parts.task, "padded", "")
    places = sum(batch[padded].numel() for batch in batches) if padded else tokens
    return Share(batches, tokens, places)


def agree(
    parts: Parts,
    own: Share,
    stop_flags: list[int],
    *,
    unsaved: bool = False,
    due: bool = False,
) -> Agreement:
    """Adds up over the ranks what each needs from all: targets, tokens, requests.

    Args:
        unsaved, due: as in Agreement, where this rank knows of it.
    """
    weight = sum(map(parts.task.weight, own.batches))
    counts = torch.tensor(
        [weight, own.tokens, own.places, int(unsaved), int(due), *stop_flags],
        dtype=torch.int64,
        device=parts.accelerator.device,
    )
    weight, tokens, places, failed, waiting, *stops = parts.accelerator.reduce(
        counts, "sum"
    ).tolist()
    asked = [outcome for outcome, count in zip(OUTCOMES, stops, strict=True) if count]
    return Agreement(
        max(weight, 1),
        tokens,
        places,
        asked[0] if asked else None,
        unsaved=failed > 0,
        due=waiting > 0,
    )


def take_step(
    parts: Parts, step: int, batches: list[Batch], weight: int, *, limit: float = math.inf
) -> StepResult:
    """Forward, backward, clipping and update; the loss is divided by `weight`.

    Args:
        limit: mean loss above which the step has spiked.

    Raises:
        Diverged: on all ranks; before the weights are touched, but for a norm that only the
            update tells.
    """
    strategy = parts.strategy
    strategy.model.train()
    loss = _accumulate(parts, batches, weight)
    if not math.isfinite(loss):
        raise Diverged(step + 1, loss / weight, math.nan)
    norm = strategy.clip(parts.config.training.max_grad_norm or math.inf)
    if norm is not None:
        _check_norm(parts, step, loss / weight, norm)
    if loss / weight > limit:
        raise Diverged(step + 1, loss / weight, math.nan if norm is None else norm, limit=limit)
    rate = float(parts.scheduler.get_last_lr()[0])
    told = strategy.update()
    if norm is None:
        norm = math.nan if told is None else told
        _check_norm(parts, step, loss / weight, norm)
    if not strategy.skipped:
        parts.scheduler.step()
    return StepResult(loss, norm, rate, overflow=strategy.skipped)


def _check_norm(parts: Parts, step: int, loss: float, norm: float) -> None:
    """Where a scaler has something left to lower, a gradient that overflowed is no divergence."""
    if not math.isfinite(norm) and parts.strategy.scale <= 1:
        raise Diverged(step + 1, loss, norm)


def _accumulate(parts: Parts, batches: list[Batch], weight: int) -> float:
    """Gradients of the global batch's mean loss; returns the loss summed over all ranks."""
    accelerator, strategy, last = parts.accelerator, parts.strategy, len(batches) - 1
    summed = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for index, batch in enumerate(batches):
        with strategy.micro_batch(last=index == last):
            total = parts.task.loss(strategy.model, parts.to_device(batch)).total
            # Gradients are averaged over the ranks; what is wanted is their sum.
            strategy.backward(total / weight * parts.world_size)
        summed += total.detach()
    return float(accelerator.reduce(summed, "sum"))
