"""What optimizers, averages and schedules cost: CPU time and memory of an update.

The peers are fused `torch.optim.AdamW` and `torch.optim.swa_utils.AveragedModel`. Run with
`pytest -m bench tests/bench/test_optimizers.py -s`. STEADYTRAIN_BENCH_ROUNDS sets how often the
updates take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.techniques.base import Update
from steadytrain.components.train.loop.components import Components
from steadytrain.components.train.loop.optim import build_scheduler
from steadytrain.components.train.loop.reporter import Reporter

from support.costed_runs import LARGER, CostedRun
from support.costs import in_turns, peak_beside
from support.scoring import fresh

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "15"))
PEER, SCHEDULED_STEPS = "torch.optim.AdamW", 1000
AVERAGES = {"ema": get_ema_multi_avg_fn(0.999), "swa": get_swa_multi_avg_fn()}


@pytest.fixture(autouse=True)
def one_rank():
    torch.set_num_threads(1)
    fresh()


def run_with(folder, **training) -> CostedRun:
    """Return a run after its first step, with the gradients of the second one."""
    run = CostedRun.make(folder, "causal_lm", LARGER, rows=1, **training)
    run.step()
    return run


def giving(parameters, gradients) -> Callable[[], None]:
    """Return a function that gives each parameter a copy of its gradient."""

    def give() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()

    return give


def test_cost_of_an_update(tmp_path):
    names = [
        name
        for name in plugins.names(plugins.OPTIMIZERS)
        if "cpu" not in optimizer_spec(name).unsupported
    ]
    runs = {
        name: run_with(
            tmp_path / name,
            optim=name,
            weight_decay=0.1,
            lr_scheduler_type="constant_with_warmup",
        )
        for name in names
    }
    modules = {name: run.parts.module for name, run in runs.items()}
    modules = {PEER: run_with(tmp_path / "peer").parts.module, **modules}
    parameters = {name: list(module.parameters()) for name, module in modules.items()}
    gradients = [torch.randn_like(item) * 1e-3 for item in parameters[PEER]]
    peer = torch.optim.AdamW(parameters[PEER], 1e-4, weight_decay=0.1, fused=True)

    def update() -> None:
        peer.step()
        peer.zero_grad()

    works = {PEER: update} | {name: run.parts.strategy.update for name, run in runs.items()}
    before = {name: giving(items, gradients) for name, items in parameters.items()}
    timed = in_turns(works, ROUNDS, before=before)
    trained = sum(item.numel() for item in parameters[PEER])
    largest = max(item.numel() * item.element_size() for item in parameters[PEER])
    print(f"\n{trained / 1e6:.1f}M weights: {timed[PEER].median * 1e3:.1f} ms for {PEER}")
    for name, run in runs.items():
        before[name]()
        present = [*run.held(), *(item.grad for item in parameters[name])]
        extra = peak_beside(present, works[name])
        kept = (
            sum(item.nbytes for item in run.held())
            - 4 * trained
            - sum(item.nbytes for item in modules[name].buffers())
        )
        print(
            f"  {name:22} {timed[name]} of CPU time; {kept / trained:.3f} bytes of state per "
            f"weight, {run.planned.memory.optimizer / trained:.3f} by the formula; "
            f"{extra / largest:.2f} times the largest matrix in the update"
        )


def test_cost_of_averages(tmp_path):
    runs = {kind: run_with(tmp_path / kind, averaging={"kind": kind}) for kind in AVERAGES}
    update = Update(step=1, loss=1.0, grad_norm=1.0, learning_rate=1e-4)
    works = {"a step": next(iter(runs.values())).step}
    kept = {}
    for kind, run in runs.items():
        made: list[Components] = []
        kept[kind] = peak_beside(
            run.held(),
            lambda run=run, made=made: made.append(Components(run.parts, Reporter(None, 1))),
        )
        works[kind] = partial(made[0].after_update, update)
        peer = AveragedModel(run.parts.module, multi_avg_fn=AVERAGES[kind])
        works[f"{kind}, AveragedModel"] = partial(peer.update_parameters, run.parts.module)
    timed = in_turns(works, ROUNDS)
    trained = sum(item.numel() for item in next(iter(runs.values())).parts.module.parameters())
    print(f"\n{trained / 1e6:.1f}M weights, one row of 128 tokens:")
    for name, each in timed.items():
        print(f"  {name:22} {each.median * 1e3:.2f} ms, {each.ratio:.1%} of a step")
    for kind, run in runs.items():
        extra = peak_beside(run.held(), works[kind])
        expected = run.planned.memory.optimizer / trained - optimizer_spec(DEFAULT).device_bytes(0)
        print(
            f"  {kind}: {kept[kind] / trained:.2f} bytes per weight, {expected:.2f} by the "
            f"formula; {extra / trained:.2f} more in the update"
        )


def test_cost_of_schedules():
    weight = torch.nn.Parameter(torch.zeros(1))

    def scheduler_of(kind: str) -> LRScheduler:
        options = {"lowest": 1e-7} if kind == "range_test" else {}
        training = TrainingConfig(
            lr_scheduler_type=kind, lr_scheduler_kwargs=options, learning_rate=1e-4
        )
        optimizer = torch.optim.AdamW([{"params": [weight], "lr_scale": 1.0}], 1e-4)
        scheduler = build_scheduler(optimizer, training, 10 * SCHEDULED_STEPS)
        optimizer.step()
        return scheduler

    def steps(scheduler: LRScheduler) -> None:
        for _ in range(SCHEDULED_STEPS):
            scheduler.step()

    kinds = plugins.names(plugins.SCHEDULES)
    timed = in_turns({kind: partial(steps, scheduler_of(kind)) for kind in kinds}, 3)
    for kind, each in timed.items():
        spent = each.median / SCHEDULED_STEPS * 1e6
        print(f"\n{kind}: {spent:.0f} microseconds of CPU time per step", end="")
    print()
