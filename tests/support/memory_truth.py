"""A real training step of a small real model, and its peak of live tensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.random_model import LiveTensors, loss_of, random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.plan.calibration import dry_run
from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.train.loop.setup import make_ready

from support.forked import on_ranks

LABELS = 4
CONFIG = {"name": "truth", "data": {"source": ["none"]}, "model": {"base": "none"}}


@dataclass(frozen=True)
class Case:
    """A model and its training settings; `classes` for a classification head."""

    model: Mapping[str, Any]
    setting: Setting
    classes: bool = False

    @property
    def labels(self) -> int:
        return LABELS if self.classes else 0


def by_formula(case: Case) -> int:
    return peak_memory(shape_of(case.model, labels=case.labels), case.setting).total


def by_dry_run(case: Case) -> int:
    return dry_run(case.model, case.setting, labels=case.labels).total


def assert_near(
    cases: Sequence[Case],
    truths: Sequence[int],
    estimate: Callable[[Case], int],
    *,
    mean: float,
    worst: float,
) -> None:
    """Assert that an estimate's mean and worst relative error are within the limits."""
    errors = {
        f"{case.model['model_type']} {case.setting}": estimate(case) / truth - 1
        for case, truth in zip(cases, truths, strict=True)
    }
    shown = "\n".join(f"{error:+.1%} {name}" for name, error in errors.items())
    sizes = [abs(error) for error in errors.values()]
    assert sum(sizes) / len(sizes) <= mean, shown
    assert max(sizes) <= worst, shown


def measured_peak(case: Case) -> int:
    """Return the peak bytes of live tensors in the second of two optimizer steps, on a CPU."""
    setting = case.setting
    torch.manual_seed(0)
    with _fresh_accelerator(setting) as accelerator, LiveTensors() as live:
        module = random_model(case.model, setting, case.labels)
        for tensor in (*module.parameters(), *module.buffers()):
            live.see(tensor, "weight")
        config = from_mapping({**CONFIG, "training": {"bf16": setting.half, "learning_rate": 1e-4}})
        strategy = make_ready(
            config,
            accelerator,
            module,
            BatchSettings(
                setting.micro_batch,
                gradient_checkpointing=setting.recompute,
                strategy=REPLICATED if setting.strategy == "single" else setting.strategy,
            ),
        )
        strategy.model.train()
        batch, parts = _batch(case), 2 if setting.accumulates else 1
        loss = loss_of(case.labels)
        for _ in range(2):
            live.begin()
            for part in range(1, parts + 1):
                with strategy.micro_batch(last=part == parts):
                    strategy.backward(loss(strategy.model, batch) / 7)
            strategy.clip(1.0)
            strategy.update()
            print(setting.strategy, Counter(live.peaks[""]).most_common(14))
        return live.peak


def measured_on_ranks(cases: Sequence[Case], ranks: int, folder: Path) -> list[int]:
    """Return the same peaks on rank 0 of several gloo processes on this machine."""
    told = folder / "peaks.json"
    on_ranks(ranks, _rank, list(cases), told)
    peaks: list[int] = json.loads(told.read_text())
    return peaks


def _rank(cases: Sequence[Case], told: Path) -> None:
    dist.init_process_group("gloo")
    peaks = [measured_peak(case) for case in cases]
    if dist.get_rank() == 0:
        told.write_text(json.dumps(peaks))
    dist.destroy_process_group()


@contextmanager
def _fresh_accelerator(setting: Setting) -> Iterator[Accelerator]:
    """Yield an Accelerator; reset its process-wide state, such as precision, before and after."""
    alone = not dist.is_initialized()
    unused = DistributedDataParallelKwargs(
        find_unused_parameters=True, gradient_as_bucket_view=True
    )
    AcceleratorState._reset_state(alone)
    GradientState._reset_state()
    try:
        precision = "bf16" if setting.half else "no"
        yield Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[unused])
    finally:
        AcceleratorState._reset_state(alone)
        GradientState._reset_state()


def _batch(case: Case) -> dict[str, torch.Tensor]:
    rows, length = case.setting.micro_batch, case.setting.length
    ids = torch.randint(0, int(case.model["vocab_size"]), (rows, length))
    if case.classes:
        mask = torch.ones_like(ids)
        mask[0, -1] = 0 if case.setting.masked else 1
        return {"input_ids": ids, "attention_mask": mask, "targets": torch.zeros(rows).long()}
    first = length // 2 if case.setting.masked else 0
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).repeat(rows, 1)
    batch = {"input_ids": ids, "position_ids": positions, "targets": ids}
    if case.setting.masked:
        return batch
    packed = {name: tensor.view(1, -1) for name, tensor in batch.items()}
    return {**packed, "lengths": [length] * rows}
