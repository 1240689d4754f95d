"""The loss of a trained model on a plane through its weights.

Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets": two random directions, each filter
of which is as long as the same filter of the weights. Networks that compute the same with weights
of another scale then have the same landscape.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from steadytrain.components.evaluate.scoring import Report, sampled, to_compute_device
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import LandscapeRecord, LandscapeRing
from steadytrain.components.tasks.base import Components, OpenTask, Scorer
from steadytrain.components.tasks.fitting import splitting

Losses = list[list[float | None]]


@dataclass(frozen=True)
class Weight:
    """A matrix of weights, or a larger array.

    filters: the dimension that counts the filters: the outputs of a layer, the rows of an
        embedding.
    trained: a copy of its values.
    """

    name: str
    parameter: torch.nn.Parameter
    filters: int
    trained: torch.Tensor


def measure_landscape(
    config: RunConfig, task: OpenTask, folder: Path, records: pa.Table, report: Report
) -> LandscapeRecord:
    """Return the loss on a grid around the trained weights.

    Args:
        folder: of the exported model.
        records: of the test side. The loss is taken on a sample of them.
        report: called with the number of points that are done.

    Raises:
        OutOfMemory: one record alone does not fit in memory.
    """
    settings = config.evaluation.landscape
    sample = sampled(records, settings.records)
    components = to_compute_device(task.packager.load_exported(folder), config)
    steps = np.linspace(-settings.radius, settings.radius, settings.points).tolist()
    with splitting("measuring the loss landscape"):
        losses = losses_on_plane(
            components["model"],
            lambda: mean_loss(task.scorer, components, sample),
            steps,
            config.training.seed,
            report,
        )
    return LandscapeRecord(
        records=sample.num_rows,
        radius=settings.radius,
        seed=config.training.seed,
        steps=steps,
        losses=losses,
        profile=rings(steps, losses),
    )


def losses_on_plane(
    model: torch.nn.Module,
    loss: Callable[[], float],
    steps: Sequence[float],
    seed: int,
    report: Report,
) -> Losses:
    """Return the loss at each point of a grid; None if it is not finite.

    The weights are afterwards what they were, also after an error.

    Args:
        steps: along both directions.

    Returns:
        One row per step along the second direction, with one value per step along the first.
    """
    result: Losses = []
    with moving(model, seed) as move:
        for second in steps:
            result.append([])
            for first in steps:
                move(first, second)
                value = loss()
                result[-1].append(value if math.isfinite(value) else None)
                report(sum(map(len, result)))
    return result


@contextmanager
def moving(model: torch.nn.Module, seed: int) -> Iterator[Callable[[float, float], None]]:
    """Yield a function that moves the weights to a point of the plane; restore them at the end.

    Only one more copy of the weights is in memory: the directions are drawn again for each point.
    """
    weights = list(weights_of(model))

    @torch.no_grad()
    def move(first: float, second: float) -> None:
        for weight in weights:
            change = first * direction(weight, seed, 0) + second * direction(weight, seed, 1)
            weight.parameter.copy_(weight.trained + change)

    try:
        yield move
    finally:
        with torch.no_grad():
            for weight in weights:
                weight.parameter.copy_(weight.trained)


def weights_of(model: torch.nn.Module) -> Iterator[Weight]:
    """Yield what the directions change: all but biases, norms and other vectors, as in the paper.

    A tied matrix counts once.
    """
    from transformers.pytorch_utils import Conv1D

    # GPT-2's own layer has its outputs in the second dimension.
    turned = {id(part.weight) for part in model.modules() if isinstance(part, Conv1D)}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            filters = 1 if id(parameter) in turned else 0
            yield Weight(name, parameter, filters, parameter.detach().clone())


def direction(weight: Weight, seed: int, axis: int) -> torch.Tensor:
    """Return a random direction of a matrix, of its shape, in float32.

    Each filter has the norm of the same filter of the trained weights (section 4 of the paper). It
    depends on the seed, the axis, the name and the kind of device alone.
    """
    trained = weight.trained.float()
    digest = hashlib.sha256(f"{seed}/{axis}/{weight.name}".encode()).digest()
    random = torch.Generator(trained.device).manual_seed(int.from_bytes(digest[:7]))
    drawn = torch.randn(trained.shape, generator=random, device=trained.device)
    within = [number for number in range(trained.dim()) if number != weight.filters]
    wanted, own = (
        torch.linalg.vector_norm(item, dim=within, keepdim=True) for item in (trained, drawn)
    )
    scale: torch.Tensor = wanted / own.clamp_min(torch.finfo(torch.float32).tiny)
    return drawn * scale


def mean_loss(scorer: Scorer, components: Components, records: pa.Table) -> float:
    """Return the mean loss of a target in nats, as the metric `loss` is defined."""
    # Far from the trained weights, numbers overflow.
    with np.errstate(all="ignore"):
        table = scorer.score(components, records)
        loss, targets = (table.column(name).to_numpy() for name in ("loss", "targets"))
        return float(np.sum(loss, dtype=np.float64) / np.sum(targets))


def rings(steps: Sequence[float], losses: Losses) -> list[LandscapeRing]:
    """Summarize the loss by distance: the larger of both steps' sizes, from the middle outwards."""
    middle = len(steps) // 2
    result = []
    for distance in range(middle + 1):
        values = [
            value
            for row, line in enumerate(losses)
            for column, value in enumerate(line)
            if max(abs(row - middle), abs(column - middle)) == distance
        ]
        finite = [value for value in values if value is not None]
        result.append(
            LandscapeRing(
                distance=steps[middle + distance],
                lowest=min(finite, default=None),
                mean=_mean(finite),
                highest=max(finite, default=None),
                not_finite=len(values) - len(finite),
            )
        )
    return result


def _mean(values: Sequence[float]) -> float | None:
    # Divided first, the sum of the largest floats stays finite.
    return math.fsum(value / len(values) for value in values) if values else None
