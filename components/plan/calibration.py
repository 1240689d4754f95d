"""What a plan measures: this machine's training speed, and the peak memory of a traced step.

The speed is that of a few steps of a plan's choice, on random weights.

The model is built from its configuration, so no weights are needed. A step is the one used in
training: its loss, its precision, its optimizer, on one device. One micro-batch and one update are
timed, and combined into a global batch.

The peak is from a step on fake tensors, with the real operators but without numbers. A trace of a
few layers, on a CPU, gives the activations; all else is arithmetic. What only a GPU's kernels do
differently is the difference between the formula's values for the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import psutil
import torch

from steadytrain.components.memory.model import any_shape, architecture_of
from steadytrain.components.memory.peak import Memory, peak_memory
from steadytrain.components.memory.random_model import loss_of, random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Shape
from steadytrain.components.memory.trace import Traced, without_attention_dropout
from steadytrain.components.shared import plugins
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import duration
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.time_cost import Span, Speed, of_all_ranks
from steadytrain.components.tasks.base import Batch, OpenTask
from steadytrain.components.tasks.documents import collate_packed, collate_rows
from steadytrain.components.tasks.sequence_classification import collate_padded
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.train.agent.ranks import threads_of_each
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.order import order_of
from steadytrain.components.train.loop.setup import make_accelerator, make_ready

_RATE: Final = 1e-4
"""Arbitrary: the learning rate doesn't affect speed."""
_LONGER_STEPS: Final = ("r_drop", "focal_loss", "adversarial")
"""Objectives that a timed step leaves out."""
STEPS: Final = 4
"""Timed steps, after one step of warm-up."""
SECONDS: Final = 60.0
"""No further step starts after this time; at least one is timed."""


def calibrate(job: Workload, choice: Choice, notify: Callable[[str], None]) -> Speed:
    """Time the choice on this machine, which must be the machine that the plan is for.

    The interval is from the slowest to the fastest step. With several ranks, one rank is timed with
    the complete model; the cost of communication is assumed, as without calibration.

    Args:
        notify: receives progress messages for people.

    Raises:
        BadInput: the choice can't be run on one device, or needs more memory than is free.
    """
    _refuse_what_one_device_cannot_show(job, choice)
    config = _as_chosen(job, choice)
    if not job.machine.gpu.cuda:
        compute = config.compute
        torch.set_num_threads(threads_of_each(compute.nproc_per_node, compute.threads_per_rank))
    try:
        trial = Trial(job, choice.setting, config, notify)
        times = list(trial.times(notify))
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"--calibrate: the GPU's memory ran out: {error}",
            remedy="set training.gradient_checkpointing=true or a smaller "
            "training.micro_batch_size, or leave --calibrate out",
        ) from error
    batch = choice.batch
    parts = batch.micro_batch_size * batch.gradient_accumulation_steps / trial.rows
    speeds = [parts * tokens / (parts * micro + update) for tokens, micro, update in times]
    each = Span(min(speeds), max(speeds))
    return Speed(of_all_ranks(each, job.machine), _source(len(times), trial, job.machine.ranks))


def _source(steps: int, trial: Trial, ranks: int) -> str:
    one, others = "", ""
    if ranks > 1:
        one, others = " of one rank", f"; communication between {ranks} ranks is assumed"
    whole = trial.setting.micro_batch
    part = f" ({trial.rows} of {whole} sequences each)" if trial.rows < whole else ""
    return f"{steps} step{'s' if steps > 1 else ''}{one} on this machine{part}{others}"


def _refuse_what_one_device_cannot_show(job: Workload, choice: Choice) -> None:
    option, task, why = choice.option, job.config.data.task, ""
    longer = [name for name in _LONGER_STEPS if name in job.config.training.objectives]
    if not plugins.is_ours(plugins.TASKS, task):
        why = f"data.task = {task!r}: only that task knows what its batches look like"
    elif task in ("denoising", "masked_lm", "text_embedding"):
        why = f"data.task = {task!r}: --calibrate times next-token prediction and classification"
    elif option.adapter == "qlora":
        why = (
            "model.adapter.kind = 'qlora': weights are quantized as they are loaded, and "
            "--calibrate loads none"
        )
    elif choice.setting.frozen_model:
        why = "a teacher or a reference: --calibrate times the model that trains alone"
    elif longer:
        why = f"training.{longer[0]}: --calibrate times steps without it"
    elif choice.setting.length > job.shape.positions:
        why = (
            f"data.sequence_length = {choice.setting.length}: the model takes at most "
            f"{job.shape.positions} tokens"
        )
    elif option.offload != "none":
        why = (
            f"compute.offload = {option.offload!r}: the speed of its transfers depends on "
            "all ranks of a machine"
        )
    if why:
        raise BadInput(f"--calibrate: {why}", remedy="leave --calibrate out, or change that field")


def _as_chosen(job: Workload, choice: Choice) -> RunConfig:
    """Return the configuration that the parts of the training loop use."""
    content, setting = job.config.model_dump(), choice.setting
    content["compute"]["device"] = "cuda" if setting.cuda else "cpu"
    content["training"] |= {
        "bf16": setting.precision == "bf16",
        "fp16": setting.precision == "fp16",
        "learning_rate": _RATE,
        "optim": setting.optim,
        "gradient_checkpointing": setting.recompute,
    }
    content["model"]["adapter"]["kind"] = setting.adapter.kind
    return RunConfig.model_validate(content)


class Trial:
    """A model on its device, and training steps with it.

    rows: sequences per step, after the warm-up.
    """

    def __init__(
        self, job: Workload, setting: Setting, config: RunConfig, notify: Callable[[str], None]
    ) -> None:
        self.config, self.setting, self.shape = config, setting, job.shape
        self.rows = setting.micro_batch
        self.accelerator = make_accelerator(config)
        self.device = self.accelerator.device
        self._refuse_what_is_too_large()
        notify(f"calibrating: {job.name} with random weights on {job.machine.gpu.name}")
        with self.device:
            module = random_model(architecture_of(config.model), setting, job.shape.labels)
        self.strategy = make_ready(
            config,
            self.accelerator,
            module,
            BatchSettings(setting.micro_batch, gradient_checkpointing=setting.recompute),
        )
        self.strategy.model.train()

    def times(self, notify: Callable[[str], None]) -> Iterator[tuple[int, float, float]]:
        """Yield for each step its tokens, and the seconds of a micro-batch and of an update."""
        began, lengths = self._now(), row_lengths(self.config, STEPS * self.rows)
        self._warm_up(lengths)
        notify(f"calibrating: warmed up in {duration(self._now() - began)}")
        for step in range(STEPS):
            if step and self._now() - began > SECONDS:
                return
            seconds = self.step(lengths[step * self.rows : (step + 1) * self.rows])
            notify(f"calibrating: step {step + 1} of {STEPS}, {sum(seconds[1:]):.2f} s")
            yield seconds

    def _warm_up(self, lengths: list[int]) -> None:
        """Warm up. On a CPU, first time one sequence, and reduce `rows` to what the time allows."""
        if not self.setting.cuda:
            _, micro, update = self.step(lengths[:1])
            self.rows = max(1, min(self.rows, int(SECONDS / STEPS / (micro + update))))
        if self.setting.cuda or self.rows > 1:
            self.step(lengths[: self.rows])

    def step(self, lengths: list[int]) -> tuple[int, float, float]:
        """Run one micro-batch with these row lengths and an update; return what `times` yields."""
        batch = self._batch(lengths)
        strategy, loss = self.strategy, loss_of(self.shape.labels)
        began = self._now()
        there = to_device(batch, self.device)
        with strategy.micro_batch(last=True):
            strategy.backward(loss(strategy.model, there) / batch["targets"].numel())
        done = self._now()
        strategy.clip(self.config.training.max_grad_norm or math.inf)
        strategy.update()
        return sum(lengths), done - began, self._now() - done

    def _batch(self, lengths: list[int]) -> Batch:
        """Return a batch of random tokens. For language models, each row packs two documents."""
        lot = np.random.default_rng(0)
        rows: list[dict[str, Any]] = [
            {
                "input_ids": lot.integers(self.shape.vocabulary, size=length),
                "targets": np.ones(length),
                "lengths": [length // 2, length - length // 2],
                "label": 0,
            }
            for length in lengths
        ]
        if not self.setting.masked:
            return collate_packed(rows)
        return (collate_padded if self.shape.labels else collate_rows)(rows, 0)

    def _refuse_what_is_too_large(self) -> None:
        need = peak_memory(self.shape, replace(self.setting, strategy="single", ranks=1)).total
        free = psutil.virtual_memory().available
        if self.setting.cuda:
            free, _ = torch.cuda.mem_get_info()
        if need > free:
            raise BadInput(
                f"--calibrate: one rank needs {need / 1e9:.1f} GB by the formula, and "
                f"{free / 1e9:.1f} GB are free here",
                remedy="free memory, set training.gradient_checkpointing=true or a smaller "
                "training.micro_batch_size, or leave --calibrate out: the plan then "
                "shows what would fit",
            )

    def _now(self) -> float:
        if self.setting.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def row_lengths(config: RunConfig, count: int) -> list[int]:
    """Return the tokens of the first rows used in training; full rows if none are prepared."""
    data = prepared(config)
    if data is None:
        return [config.data.sequence_length] * count
    rows = Rows.of(data, "train")
    order = order_of(rows, OpenTask(config, data).training, config.training)
    return [len(rows[index]["input_ids"]) for index in order.take(0, count)]


def dry_run(
    architecture: Mapping[str, Any],
    setting: Setting,
    *,
    labels: int = 0,
    shape: Shape | None = None,
) -> Memory:
    """Return the peak of a rank's memory during a step other than the first.

    Args:
        architecture: Transformers' configuration of the model, including `model_type`.
        labels: classes of a classification head; 0 for a language model's head.
        shape: of the model, if parameters of it are frozen.

    Raises:
        BadInput: the architecture is unknown or can't be built, or fakes can't run it.
    """
    shape = shape or any_shape(architecture, labels)
    if shape.traits is None or not setting.cuda:
        return peak_memory(_traced(shape, architecture, labels), setting)
    # A GPU's kernels do not keep attention's dropout, so neither does the trace.
    cpu, undropped = replace(setting, cuda=False), replace(shape, attention_dropout=0.0)
    traced = _traced(shape, without_attention_dropout(architecture), labels)
    return _moved(
        peak_memory(traced, cpu), peak_memory(undropped, cpu), peak_memory(undropped, setting)
    )


def _traced(shape: Shape, architecture: Mapping[str, Any], labels: int) -> Shape:
    return replace(shape, traced=Traced(architecture, shape.layers, labels, exact=True))


def _moved(found: Memory, ran: Memory, meant: Memory) -> Memory:
    """Add the formula's difference. If a part gets negative, the activations cover the rest."""
    parts = {
        name: found.parts.get(name, 0) + size - ran.parts.get(name, 0)
        for name, size in meant.parts.items()
    }
    lacking = sum(min(size, 0) for size in parts.values())
    parts = {name: max(size, 0) for name, size in parts.items()}
    parts["activations"] += lacking
    return replace(Memory.of_parts(parts, found.moment), host=meant.host, disk=meant.disk)
