"""Run a study until it is complete, as `tune`, `ablate` and `cross-validate` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.errors import SteadytrainError, Stopped

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.tune.driver import Watcher
    from steadytrain.components.tune.history import Params
    from steadytrain.components.tune.study import NewDesign, Study


def run_study(
    config: RunConfig,
    watcher: Watcher,
    notify: Callable[[str], object],
    *,
    write: Callable[[Study, Path], None],
    first: Callable[[], Sequence[Params]] = list,
    design: NewDesign | None = None,
    imports: Sequence[str] = (),
) -> Study:
    """Run or continue a study. If it is stopped, say how to continue it.

    Args:
        notify, write, first, design, imports: see `search`.

    Raises:
        Stopped: the process was asked to stop; the same command continues the study.
        SteadytrainError: see `driving` and `search`.
    """
    from steadytrain.components.tune.driver import driving
    from steadytrain.components.tune.search import search
    from steadytrain.pipelines.local import print_line

    try:
        with driving(config) as log:
            return search(
                config,
                log,
                watcher,
                notify,
                write=write,
                first=first,
                design=design,
                imports=imports,
            )
    except Stopped:
        print_line("stopped; nothing is lost: the same command continues the study")
        raise


def training_cost(config: RunConfig, steps: int) -> tuple[float | None, str]:
    """Return the hours of training by the planner, and the estimate in words.

    Args:
        steps: optimizer steps of all trials together.
    """
    from steadytrain.components.plan.plan import plan_training
    from steadytrain.components.shared.quantities import duration, money
    from steadytrain.components.sizing.hardware import all_gpus
    from steadytrain.pipelines.plan_hardware import choose_hardware

    table = all_gpus()
    try:
        gpus, gpu, hosts = choose_hardware(
            config, table, "", cluster=False, own=False, host_memory_gb=0
        )
        plan = plan_training(config, gpus, gpu, hosts)
    except SteadytrainError as error:
        return None, f"unknown: {error.message}"
    if plan.offer.hours is None:
        return None, "unknown: the length of a trial is not known"
    hours = plan.offer.hours.middle * steps / config.training.max_steps
    price = config.compute.price_per_hour
    usd = None if price is None else hours * price
    if usd is None and plan.offer.usd is not None:
        usd = plan.offer.usd.middle * steps / config.training.max_steps
    cost = "" if usd is None else f", {money(usd)}"
    seconds = hours * 3600
    time = f"about {duration(seconds)}" if seconds >= 1 else "less than a second"
    return hours, f"{time} of training on {plan.offer.gpu}{cost} (formula)"
