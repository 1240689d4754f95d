"""The planner of each configuration: which options it reads, its plan, and what follows from it."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, cast

import typer

from steadytrain.components.memory.model import any_model_shape, architecture_of, label_count
from steadytrain.components.plan.design import (
    Design,
    Resources,
    Storage,
    cost_estimate,
    design_of_network,
    design_of_plan,
    design_of_series,
    design_of_table,
    storage_of,
)
from steadytrain.components.plan.plan import Plan, plan_training
from steadytrain.components.plan.render import render, texts
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import IMAGES, MULTIMODAL, SERIES
from steadytrain.components.shared.config.fields import Decision, set_by_user
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import PriceTable, own_prices
from steadytrain.components.sizing.recipe import recipe_of_run
from steadytrain.components.sizing.time_cost import by_table
from steadytrain.components.tasks.base import load_task
from steadytrain.components.train.transformers_script import TransformersRun, without_trainer
from steadytrain.pipelines.options import check_extra, refuse_unread
from steadytrain.pipelines.plan_hardware import Hardware

if TYPE_CHECKING:
    from steadytrain.components.memory.peak import Memory
    from steadytrain.components.plan.design import AnyPlan
    from steadytrain.components.plan.networks import NetworkPlan
    from steadytrain.components.plan.prepared_sample import KnownData
    from steadytrain.components.sizing.fit import Choice, Measure
    from steadytrain.components.sizing.time_cost import Timing

_SHARED: Final = ("--calibrate", "--prices", "--provider", "--write")
_READS: Final[Mapping[str, Sequence[str]]] = {
    "table": (*_SHARED, "--formula"),
    "series": (*_SHARED, "--formula"),
    "network": (*_SHARED, "--gpu", "--gpu-type", "--nodes", "--gpus-per-node"),
}
"""Options that a plan reads, by planner. The one of texts reads all."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what follows from it."""

    plan: AnyPlan
    config: RunConfig
    design_of: Callable[..., Design]

    def design(self, resources: Resources) -> Design:
        """Return the design, with the pipeline that kfp compiles."""
        from steadytrain.pipelines.design import pipeline_config

        pipeline = partial(pipeline_config, self.config)
        return self.design_of(self.plan, self.config, pipeline, resources)

    def storage(self, resources: Resources) -> Storage:
        """Return the disk space of the run."""
        return storage_of(self.plan, self.config, resources)

    @property
    def leaves_budget(self) -> bool:
        """Whether only the design compares the cost with the budget, as for all but texts."""
        return not isinstance(self.plan, Plan) and self.config.compute.budget_usd is not None

    def lines(self, resources: Resources, tokens_per_second: float) -> Iterator[str]:
        """Yield the plan for people, with the disk space and the price of inference."""
        space = self.storage(resources).line()
        if isinstance(self.plan, Plan):
            cost = cost_estimate(self.plan).serving(tokens_per_second)
            yield from (render(self.plan), "", space, *cost.inference_lines())
        else:
            yield from (*self.plan.lines(), space)

    def files(self) -> dict[str, str]:
        """Return the texts of steadytrain.yaml and of files for other launchers, by name."""
        if isinstance(self.plan, Plan):
            return texts(self.plan)
        network = planner_of(self.config.data.task) == "network"
        peer = self._peer() if network else without_trainer(self.config)
        return {"steadytrain.yaml": self.config.to_yaml(), **peer.texts()}

    def _peer(self) -> TransformersRun:
        """Return the run of a network as Transformers' Trainer does it."""
        training, plan = self.config.training, cast("NetworkPlan", self.plan)
        fits = f"the largest that fits {plan.device}"
        micro = Decision("training.micro_batch_size", plan.micro_batch, fits)
        return TransformersRun.of(
            self.config,
            [
                *recipe_of_run(self.config, plan.parameters),
                set_by_user(self.config, micro.field) if training.micro_batch_size else micro,
            ],
            BatchSettings(
                plan.micro_batch, gradient_checkpointing=bool(training.gradient_checkpointing)
            ),
            plan.accumulation,
        )


def planner_of(task: str) -> Literal["table", "series", "network", "texts"]:
    """Return which planner plans a task."""
    if load_task(task).tabular:
        return "table"
    if task in SERIES:
        return "series"
    return "network" if task in (*IMAGES, *MULTIMODAL) else "texts"


def planned(
    config: RunConfig,
    hardware: Callable[[], Hardware],
    *,
    command: str,
    given: Mapping[str, object] | None = None,
    prices: PriceTable | None = None,
    data_bytes: int | None = None,
    known: Callable[[], KnownData] | None = None,
    calibrate: bool = False,
    hours: bool = False,
    dry_run: bool = False,
) -> Planned:
    """Plan a configuration with the planner of its task.

    Args:
        hardware: what to choose from; called only for models that train on GPUs.
        command: the command that plans, for errors.
        given: options by name; an empty one was not given.
        prices: of models that train on the CPU alone. None means steadytrain's own.
        data_bytes: of all data, if the files here are a sample of them.
        known: prepared data to plan with. None prepares them if the plan needs them.
        calibrate: whether to time real steps on this machine.
        hours: whether to time them for models whose time has no formula, if that is possible.
        dry_run: whether to measure the memory of a model of texts, if torch is installed.

    Raises:
        BadInput: the plan does not read an option, it needs packages or data that are not here, or
            the configuration cannot be planned.
        DataError: the data cannot be used.
    """
    task, planner = config.data.task, planner_of(config.data.task)
    if planner == "texts":
        gpus, wanted, hosts, origin = hardware()
        plan = plan_training(
            config,
            gpus,
            wanted,
            hosts,
            measure=_measure(config) if dry_run else None,
            timed=_on_this_machine() if calibrate else by_table,
            prices=origin,
            data_bytes=data_bytes,
        )
        return Planned(plan, config, design_of_plan)
    refuse_unread(given or {}, f"a plan for {task} does not have it", reads=_READS[planner])
    if config.training.goal is not None:
        raise BadInput(
            f"training.goal = {config.training.goal!r}: a plan for {task} chooses no methods",
            remedy="leave it out",
        )
    prices = prices or own_prices()
    if planner == "table":
        from steadytrain.components.plan.tables import plan_table

        table = plan_table(config, data_bytes, prices, calibrate=calibrate, hours=hours)
        return Planned(table, config, design_of_table)
    check_extra("train", command)
    from steadytrain.components.plan.prepared_sample import known_data

    data = nullcontext(known()) if known else known_data(config, data_bytes)
    if planner == "series":
        from steadytrain.components.plan.series import plan_series

        with data as there:
            series = plan_series(config, there, prices, calibrate=calibrate or hours)
        return Planned(series, config, design_of_series)
    from steadytrain.components.plan.networks import plan_network

    gpus, wanted, _, origin = hardware()
    with data as there:
        network = plan_network(config, there, gpus, wanted, prices=origin, calibrate=calibrate)
    return Planned(network, config, design_of_network)


def _measure(config: RunConfig) -> Measure | None:
    """Return a function that measures a choice with a dry run; None if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None

    def measure(choice: Choice) -> Memory:
        typer.echo("memory by a dry run on fake tensors; --formula leaves it out", err=True)
        from steadytrain.components.plan.calibration import dry_run

        # It warns of kernels that it has not, which fakes do not need.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):
            return dry_run(
                architecture_of(config.model),
                choice.setting,
                labels=label_count(config),
                shape=any_model_shape(config),
            )

    return measure


def _on_this_machine() -> Timing:
    """Return a timing that calibrates on this machine."""
    from steadytrain.components.plan.calibration import calibrate

    return partial(calibrate, notify=partial(typer.echo, err=True))
