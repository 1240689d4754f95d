"""Train a network that forecasts all times ahead at once, by PyTorch's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from steadytrain.components.series.encoder import NAME, TIME
from steadytrain.components.series.errors import histories_of, read_values
from steadytrain.components.series.learner import described, repeating_dates
from steadytrain.components.series.model import (
    QUANTILES,
    Calendar,
    History,
    NetworkModel,
    Window,
    naive_scale,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Batch, LossSum, Row

MODEL_TYPE: Final = "mlp"
_LEVELS: Final = tuple(QUANTILES.values())
_SIZES: Final = {"width": 128, "blocks": 2, "context": 0}
_LEAST_CONTEXT, _SEASONS = 24, 2


class Block(torch.nn.Module):
    """A layer and its residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        return hidden + inner


class Network(torch.nn.Module):
    """What `model.NetworkModel` computes. It begins as the seasonal naive forecast.

    Args:
        inputs: number of features.
    """

    def __init__(self, inputs: int, horizon: int, width: int, blocks: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.first = torch.nn.Linear(inputs, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = torch.nn.Linear(width, horizon * len(_LEVELS))
        torch.nn.init.zeros_(self.last.weight)
        torch.nn.init.zeros_(self.last.bias)

    def forward(self, inputs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return quantiles relative to a window's mean and deviation: (windows, horizon, 3).

        Args:
            inputs: (windows, features).
            base: (windows, horizon).
        """
        hidden = torch.relu(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        shifts: torch.Tensor = self.last(hidden).view(len(inputs), self.horizon, len(_LEVELS))
        return base[..., None] + shifts


@dataclass(frozen=True)
class _Known:
    """A series as windows read it.

    past: the training side.
    truth: values of the training and the validation side by time from the first one on: (times,);
        NaN where there is none.
    known: `NetworkModel.known_inputs` from `context` times before the first one to `horizon` times
        after the last one.
    first: the ordinal of the first time.
    unit: error of the seasonal naive forecast of the training side.
    """

    past: History
    truth: Any
    known: Any
    first: int
    unit: float


class Forecasting:
    """Learn quantiles of all times ahead, from windows of the training side.

    A row of the training side is the window of the values before it; its targets are the values
    from there on. A row of the validation side is forecast from all of the training side. The loss
    is the mean quantile loss at 0.1, 0.5 and 0.9, and that of the validation the error of the
    median, both in errors of the seasonal naive forecast of the training side, as in MASE.
    """

    task = "forecasting"
    metric = "loss"
    greater_is_better = False

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data
        self.sizes = _sizes(config, data)

    @cached_property
    def model(self) -> NetworkModel:
        """What is exported, without its weights."""
        return network_model(self.config, self.data, self.sizes["context"])

    @cached_property
    def series(self) -> dict[str, _Known]:
        model, step = self.model, self.model.calendar.step
        train = read_values(self.data, model.calendar, "train")
        held_out = read_values(self.data, model.calendar, "validation")
        pasts, _ = histories_of(train, step)
        _, known = histories_of([*train, *held_out], step)
        ends = {name: past.last for name, past in pasts.items()}
        for one in held_out:
            ends[one.series] = max(ends[one.series], one.ordinal)
        result = {
            name: self._known(past, ends[name], known.get(name, {})) for name, past in pasts.items()
        }
        for one in [*train, *held_out]:
            series = result[one.series]
            series.truth[(one.ordinal - series.first) // step] = one.value
        return result

    def _known(self, past: History, end: int, known: Mapping[int, Sequence[float]]) -> _Known:
        model, step = self.model, self.model.calendar.step
        first = past.last - step * (len(past.values) - 1)
        start, stop = first - step * model.context, end + step * model.horizon
        return _Known(
            past,
            np.full((end - first) // step + 1, np.nan),
            model.known_inputs(range(start, stop + 1, step), known),
            first,
            naive_scale(past.values, model.season) or 1.0,
        )

    def build_model(self) -> torch.nn.Module:
        width, blocks = self.sizes["width"], self.sizes["blocks"]
        return Network(self.model.size, self.model.horizon, width, blocks)

    def cost(self, row: Row) -> int:
        del row
        return 1

    def collate(self, rows: Sequence[Row]) -> Batch:
        windows, targets, units = list[Window](), list[Any](), list[float]()
        for row in rows:
            series = self.series[row[NAME]]
            ordinal = self.model.calendar.ordinal(row[TIME])
            index = (ordinal - series.first) // self.model.calendar.step
            origin, target = self._targets(series, index)
            whole = self.model.context + self.model.horizon
            known = series.known[origin : origin + whole]
            windows.append(self.model.window(series.past.values[:origin], known))
            targets.append(target)
            units.append(series.unit)
        return {
            "inputs": torch.from_numpy(np.stack([one.inputs for one in windows])),
            "base": torch.from_numpy(np.stack([one.base for one in windows])),
            "targets": torch.from_numpy(np.stack(targets)),
            "center": torch.tensor([[one.center] for one in windows], dtype=torch.float64),
            "scale": torch.tensor([[one.scale] for one in windows], dtype=torch.float64),
            "unit": torch.tensor([[unit] for unit in units], dtype=torch.float64),
        }

    def _targets(self, series: _Known, index: int) -> tuple[int, Any]:
        """Return how many values a window begins after, and its targets; NaN for none.

        Args:
            index: of the row's time.
        """
        horizon, length = self.model.horizon, len(series.past.values)
        targets = np.full(horizon, np.nan)
        if index >= length:
            if index - length < horizon:
                targets[index - length] = series.truth[index]
            return length, targets
        # Nothing comes before the first value.
        origin = max(1, index)
        values = series.truth[origin : min(origin + horizon, length)]
        targets[: len(values)] = values
        return origin, targets

    def weight(self, batch: Batch) -> int:
        return int((~batch["targets"].isnan()).sum())

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        there, scale = ~batch["targets"].isnan(), batch["scale"] / batch["unit"]
        relative = ((batch["targets"] - batch["center"]) / batch["scale"]).nan_to_num().float()
        quantiles = model(batch["inputs"], batch["base"]).float()
        levels = torch.tensor(_LEVELS, device=quantiles.device)
        deviations = relative[..., None] - quantiles
        losses = torch.maximum(levels * deviations, (levels - 1) * deviations).mean(dim=-1)
        return LossSum((losses * scale.float() * there).sum())

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        quantiles = model(batch["inputs"], batch["base"]).double().sort(dim=-1).values
        median = batch["center"] + batch["scale"] * quantiles[..., _LEVELS.index(0.5)]
        there = ~batch["targets"].isnan()
        deviations = (median - batch["targets"]).abs().nan_to_num()
        return {
            "loss": float((deviations / batch["unit"]).sum()),
            "absolute": float(deviations.sum()),
            "squared": float(deviations.square().sum()),
            "weight": int(there.sum()),
        }

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["weight"]
        return {
            "loss": sums["loss"] / count,
            "rmse": float(np.sqrt(sums["squared"] / count)),
            "mae": sums["absolute"] / count,
        }


def written(task: Forecasting, network: torch.nn.Module) -> NetworkModel:
    """Return what is exported of a network."""
    result = network_model(task.config, task.data, task.sizes["context"])
    weights = {name: it.detach().float().cpu() for name, it in network.state_dict().items()}
    result.weights = {name: it.contiguous().clone().numpy() for name, it in weights.items()}
    return result


def network_model(config: RunConfig, data: DataRecord, context: int) -> NetworkModel:
    """Return the exported model without its weights, with the covariates' scales."""
    shared = described(MODEL_TYPE, config, data)
    calendar = Calendar(**shared["calendar"])
    center, spread = list[float](), list[float]()
    if shared["covariates"]:
        rows = np.array([one.covariates for one in read_values(data, calendar, "train")])
        deviation = rows.std(axis=0)
        center = rows.mean(axis=0).tolist()
        spread = np.where(deviation > 1e-9, deviation, 1.0).tolist()
    dates = repeating_dates(calendar)
    return NetworkModel(**shared, context=context, dates=dates, center=center, spread=spread)


def _sizes(config: RunConfig, data: DataRecord) -> dict[str, int]:
    """Return width, blocks and context of `model.config`.

    Raises:
        BadInput: it has something else, or no network for series.
    """
    given = dict(config.model.config)
    name = given.pop("model_type", None)
    if name != MODEL_TYPE:
        raise BadInput(
            f"model.config.model_type = {name!r}: PyTorch has no such model for series",
            remedy=f"set it to {MODEL_TYPE}",
        )
    for field, value in given.items():
        if field not in _SIZES or type(value) is not int or value < 1:
            raise BadInput(
                f"model.config.{field} = {value!r}: {MODEL_TYPE} has the whole numbers "
                f"{', '.join(_SIZES)}",
                remedy="leave it out, or give a number above 0",
            )
    result = {**_SIZES, **given}
    if not result["context"]:
        shared = described(MODEL_TYPE, config, data)
        result["context"] = max(_LEAST_CONTEXT, _SEASONS * shared["season"], shared["horizon"])
    return result
