"""What training on time series takes: memory, steps, and on request the time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final

from steadytrain.components.plan.prepared_sample import KnownData
from steadytrain.components.plan.step_time import (
    Measured,
    mean_seconds,
    measured,
    time_lines,
)
from steadytrain.components.plan.stored import Stored
from steadytrain.components.series.boosting import BoostingLearner
from steadytrain.components.series.ensemble import SeriesEnsembleLearner
from steadytrain.components.series.errors import read_series
from steadytrain.components.series.learner import StatisticalLearner
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.config.model import ENSEMBLE
from steadytrain.components.shared.quantities import duration, size
from steadytrain.components.sizing.hardware import PriceTable, cores_of_rank
from steadytrain.components.sizing.length import total_steps
from steadytrain.components.sizing.time_cost import Span

_DOUBLE, _SINGLE, _BIN = 8, 4, 1
"""Bytes of a feature as it is made, of a weight, and of a binned feature."""
_COPIES: Final = 4
"""Of the weights while AdamW trains them: weights, gradients and two moments."""


@dataclass(frozen=True)
class SeriesPlan:
    """Everything that `steadytrain plan` reports of time series.

    series, rows: of the training side; an ensemble also learns from the validation side.
    rows_from: where these numbers come from.
    features: numbers that a model reads to forecast; 0 if it reads the values alone.
    parameters: weights of a network; 0 for other models.
    memory: bytes of what is learned from and of the model in training, besides the libraries.
    step_seconds: measured on this machine; None if that was not asked for.
    usd_per_hour: of the cores that it trains on; None if their price is unknown, or on GPUs.
    prices: where that is from.
    stored: after all steps; None if no step was measured, unless it is a network.
    """

    framework: str
    model: str
    series: int
    rows: int
    rows_from: str
    horizon: int
    features: int
    parameters: int
    memory: int
    steps: int
    step_seconds: float | None
    usd_per_hour: float | None
    prices: str
    remarks: list[str]
    stored: Stored | None
    works: ClassVar = True

    @property
    def seconds(self) -> float | None:
        """How long all steps take, without validation."""
        return None if self.step_seconds is None else self.steps * self.step_seconds

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs."""
        return asdict(self) | {"seconds": self.seconds}

    def lines(self) -> Iterator[str]:
        """Yield the plan for people."""
        reads = f"{self.features:,} features" if self.features else "the values alone"
        yield f"model    {self.model}, by {self.framework}"
        if self.parameters:
            yield f"weights  {self.parameters:,}"
        yield f"series   {self.series:,} with {self.rows:,} values to learn from"
        yield f"         by {self.rows_from}"
        yield f"reads    {reads}, to forecast {self.horizon:,} times"
        yield f"memory   {size(self.memory)}, besides the libraries"
        yield f"steps    {self.steps:,}"
        if self.seconds is None or self.step_seconds is None:
            yield "time     not measured"
        else:
            source = f": {duration(self.step_seconds)} for a step here, measured"
            yield from time_lines(Span.of(self.seconds / 3600), source, self.usd_per_hour)
        yield from (f"  remark: {remark}" for remark in self.remarks)


def plan_series(
    config: RunConfig, known: KnownData, prices: PriceTable, *, calibrate: bool = False
) -> SeriesPlan:
    """Plan a training run on time series.

    Args:
        prices: of cores.
        calibrate: whether to time real steps.

    Raises:
        BadInput: the model cannot learn from the data.
    """
    data = known.record
    series, training = read_series(data), config.training
    framework, model_type = config.model.framework, str(config.model.config.get("model_type"))
    rows, whole = known.rows, total_steps(training, 1, 1)
    parameters, seconds, stored = 0, None, None
    if framework == "pytorch":
        features, parameters, memory, seconds = _network(config, known, calibrate)
        stored = Stored.of_weights(parameters, parameters)
        whole = total_steps(training, rows, training.global_batch_size)
    elif framework == ENSEMBLE:
        ensemble = SeriesEnsembleLearner(config, data)
        # One after the other is trained.
        parts = [
            _of_member(ensemble, index, known, calibrate) for index in range(len(ensemble.members))
        ]
        rows, features, memory = (max(it) for it in zip(*(part[:3] for part in parts), strict=True))
        if steps := [step for *_, step in parts if step]:
            mean = Measured.of_ensemble(steps, [item.max_steps for item in ensemble.members])
            seconds, stored = mean.seconds, mean.stored
    else:
        learner = BoostingLearner if framework == "mlforecast" else StatisticalLearner
        rows, features, memory, step = _of_learner(
            learner(config, data), known, whole if calibrate else 0
        )
        if step:
            seconds, stored = step.seconds, step.stored
    return SeriesPlan(
        framework=framework,
        model=model_type,
        series=max(1, round(series.count * known.scale)),
        rows=rows,
        rows_from=known.source,
        horizon=config.data.series.horizon or 0,
        features=features,
        parameters=parameters,
        memory=memory,
        steps=whole,
        step_seconds=seconds,
        usd_per_hour=_price(config.compute, prices.core),
        prices=prices.origin,
        remarks=list(series.remarks()),
        stored=stored,
    )


def _price(compute: ComputeConfig, core: float | None) -> float | None:
    """Return USD per hour for the cores of all ranks."""
    if core is None or compute.device == "cuda":
        return None
    return core * cores_of_rank(compute) * compute.world_size


def _of_member(
    ensemble: SeriesEnsembleLearner, index: int, known: KnownData, calibrate: bool
) -> tuple[int, int, int, Measured | None]:
    """Return the same of a member as `_of_learner`, for both times that it learns."""
    steps = ensemble.members[index].max_steps if calibrate else 0
    if ensemble.members[index].framework != "pytorch":
        rows, features, memory, step = _of_learner(ensemble.member(index), known, steps)
    else:
        both = replace(known, record=ensemble.data)
        features, weights, memory, seconds = _network(ensemble.configs[index], both, calibrate)
        stored = Stored.of_weights(weights, weights)
        rows, step = both.rows, None if seconds is None else Measured(seconds, stored)
    if step and ensemble.learns_twice(index):
        stored = replace(step.stored, checkpoint=2 * step.stored.checkpoint)
        step = Measured(2 * step.seconds, stored)
    return rows, features, memory, step


def _of_learner(
    learner: BoostingLearner | StatisticalLearner, known: KnownData, steps: int
) -> tuple[int, int, int, Measured | None]:
    """Return rows, features, memory, and its steps, measured if there are any."""
    step = measured(learner, steps, known.scale) if steps else None
    if isinstance(learner, StatisticalLearner):
        rows = round(len(learner.past) * known.scale)
        return rows, 0, rows * _DOUBLE, step
    features = learner.matrix.shape[1]
    rows = round(len(learner.matrix) * known.scale)
    return rows, features, rows * features * (_DOUBLE + _BIN), step


def _network(
    config: RunConfig, known: KnownData, calibrate: bool
) -> tuple[int, int, int, float | None]:
    """Return features, weights, memory, and the seconds of a step."""
    # Imported late: torch takes seconds.
    import torch

    from steadytrain.components.series.training import Forecasting
    from steadytrain.components.train.loop.data import Rows

    data = known.record
    task = Forecasting(config, data)
    network = task.build_model()
    weights = sum(weight.numel() for weight in network.parameters())
    size = config.training.global_batch_size
    micro = min(config.training.micro_batch_size or size, size)
    memory = _COPIES * _SINGLE * weights + micro * task.model.size * _SINGLE
    memory += known.rows * _DOUBLE
    if not calibrate:
        return task.model.size, weights, memory, None
    rows = Rows.of(data, "train")
    optimizer = torch.optim.AdamW(network.parameters())
    steps = itertools.count()

    def learn() -> None:
        step = next(steps)
        for first in range(0, size, micro):
            places = [(step * size + first + index) % len(rows) for index in range(micro)]
            batch = task.collate([rows[index] for index in places])
            loss: Any = task.compute_loss(network, batch).total / task.weight(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return task.model.size, weights, memory, mean_seconds(learn)
