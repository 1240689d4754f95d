"""What training a network on images or mixed records takes: memory, steps and hours.

The memory is that of a step on fake tensors: the task's own model, loss and micro-batch, with the
real operators but no numbers.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from steadytrain.components.memory.random_model import LiveTensors, fake, fake_mode
from steadytrain.components.plan.prepared_sample import KnownData
from steadytrain.components.plan.step_time import time_lines
from steadytrain.components.plan.stored import Stored
from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import size
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.sizing.fit import SPARE
from steadytrain.components.sizing.hardware import OWN_PRICES, TFLOPS_OF_A_UNIT, Gpu
from steadytrain.components.sizing.length import total_steps
from steadytrain.components.sizing.machine import Machine
from steadytrain.components.sizing.time_cost import ASSUMED, THE_TABLE, Span, of_all_ranks
from steadytrain.components.tasks.base import Batch, OpenTask
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.train.agent.ranks import threads_of_each
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.optim import OptimizerBuilder
from steadytrain.components.train.loop.setup import recompute_activations

_UTILIZATION: Final = (0.1, 0.45)
"""Share of a device's peak that training reaches: an assumption. Convolutions reach less of it than
the matrix products of transformers."""
_FORWARD, _BACKWARD, _UPDATE = "the forward pass", "the backward pass", "the update"
_STEPS: Final = 4


@dataclass(frozen=True)
class NetworkPlan:
    """Everything that `steadytrain plan` reports of a network for images or mixed records.

    micro_batch: records of a rank's forward pass; the largest that fits, or what the user set.
    moment: the part of a step with the peak of the memory.
    memory: bytes of a rank at that peak, by what they hold.
    usable: bytes of the device that a plan may use.
    flops: of a record, forward and backward.
    records_per_second: of all ranks.
    rows: records of the training side.
    rows_from: where that number comes from.
    usd_per_hour: of all devices; None if the price is unknown.
    prices: where those of GPUs are from.
    """

    model: str
    parameters: int
    trained: int
    device: str
    ranks: int
    precision: str
    micro_batch: int
    accumulation: int
    moment: str
    parts: dict[str, int]
    memory: int
    usable: int
    flops: float
    records_per_second: Span
    speed_from: str
    rows: int
    rows_from: str
    steps: int
    hours: Span
    usd_per_hour: float | None
    prices: str
    remarks: list[str]

    @property
    def works(self) -> bool:
        """Whether the memory is enough."""
        return self.memory <= self.usable

    @property
    def stored(self) -> Stored:
        """What a checkpoint and the model take on disk."""
        return Stored.of_weights(self.trained, self.parameters)

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs."""
        return {**asdict(self), "works": self.works}

    def lines(self) -> Iterator[str]:
        """Yield the plan for people."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        held = ", ".join(f"{name} {size(held)}" for name, held in parts if held)
        speed = self.records_per_second
        yield f"model    {self.model}: {self.parameters:,} parameters, {self.trained:,} trained"
        yield f"device   {self.ranks} x {self.device}, {self.precision}"
        yield f"batch    {self.micro_batch} x {self.accumulation} on each rank"
        yield f"memory   {size(self.memory)} at the peak, in {self.moment} ({held})"
        yield f"         {size(self.usable)} are usable: {'fits' if self.works else 'does not fit'}"
        yield f"work     {self.flops / 1e9:.3g} GFLOP for each record, forward and backward"
        yield f"speed    {speed.low:,.3g} to {speed.high:,.3g} records a second ({self.speed_from})"
        yield f"steps    {self.steps:,}, of {self.rows:,} records of the training side"
        yield f"         by {self.rows_from}"
        yield from time_lines(self.hours, "", self.usd_per_hour)
        yield from (f"  remark: {remark}" for remark in self.remarks)


def plan_network(
    config: RunConfig,
    known: KnownData,
    gpus: Sequence[Gpu],
    gpu: Gpu | None,
    *,
    prices: str = OWN_PRICES,
    calibrate: bool = False,
) -> NetworkPlan:
    """Plan a training run, with a copy of the model on each rank.

    Args:
        gpus: the kinds to choose from.
        gpu: the kind to plan for; None means the smallest of these that fits.
        prices: where those of `gpus` are from.
        calibrate: whether to time real steps on this machine, which must be the one to plan for.

    Raises:
        BadInput: the model cannot be built, or fakes cannot run it.
    """
    trial = Trial(config, known)
    kinds = [gpu] if gpu else sorted(gpus, key=lambda kind: kind.memory)
    for kind in kinds:
        memory = trial.on(kind, prices)
        if memory.works:
            break
    return trial.timed(memory, kind) if calibrate else memory


@dataclass(frozen=True)
class Peak:
    """The most memory of a rank in a step other than the first, and the work of the step.

    parts: bytes by what they hold.
    """

    moment: str
    parts: dict[str, int]
    flops: float

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Trial:
    """A configured model and its data, without weights."""

    def __init__(self, config: RunConfig, known: KnownData) -> None:
        self.config, self.known, self.data = config, known, known.record
        self.task: Any = OpenTask(config, self.data).training
        self.rows = Rows.of(self.data, "train")
        self._peaks: dict[tuple[int, bool, bool], Peak] = {}

    def on(self, gpu: Gpu, prices: str = OWN_PRICES) -> NetworkPlan:
        """Return the plan for a kind of device, with where its price is from."""
        compute, training = self.config.compute, self.config.training
        machine = Machine(gpu, compute.nodes, compute.nproc_per_node)
        half = training.bf16 or training.fp16
        usable = int((1 - SPARE) * gpu.memory)
        share = training.global_batch_size // machine.ranks
        sizes = [training.micro_batch_size or share]
        while not training.micro_batch_size and sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        for micro in sizes:
            batch = plan_batch(
                training.global_batch_size,
                machine.ranks,
                training.micro_batch_size,
                limit=micro,
            )
            accumulates = batch.gradient_accumulation_steps > 1
            peak = self.peak(batch.micro_batch_size, half=half, accumulates=accumulates)
            if peak.total <= usable:
                break
        with torch.device("meta"):
            model = self.task.build_model()
        weights = [parameter.numel() for parameter in model.parameters()]
        flops = peak.flops / batch.micro_batch_size
        sustained = min(gpu.half_tflops if half else gpu.fp32_tflops, gpu.speed * TFLOPS_OF_A_UNIT)
        speed = of_all_ranks(
            Span(*(sustained * part * 1e12 / flops for part in _UTILIZATION)), machine
        )
        steps = total_steps(training, self.known.rows)
        return NetworkPlan(
            model=self._name(model),
            parameters=sum(weights),
            trained=sum(one.numel() for one in model.parameters() if one.requires_grad),
            device=gpu.name,
            ranks=machine.ranks,
            precision=training.precision,
            micro_batch=batch.micro_batch_size,
            accumulation=batch.gradient_accumulation_steps,
            moment=peak.moment,
            parts=peak.parts,
            memory=peak.total,
            usable=usable,
            flops=flops,
            records_per_second=speed,
            speed_from=THE_TABLE if gpu.cuda else ASSUMED,
            rows=self.known.rows,
            rows_from=self.known.source,
            steps=steps,
            hours=self._hours(speed, steps),
            usd_per_hour=self._price(machine),
            prices=prices,
            remarks=[*self._remarks(model)],
        )

    def timed(self, plan: NetworkPlan, gpu: Gpu) -> NetworkPlan:
        """Return a plan with the speed of real steps on this machine, on one rank.

        Raises:
            BadInput: the memory is not enough for them.
        """
        if not plan.works:
            raise BadInput(
                f"--calibrate: a rank needs {size(plan.memory)}, and {size(plan.usable)} are "
                "usable here",
                remedy="set a smaller training.micro_batch_size, or leave --calibrate out",
            )
        seconds = self.step_seconds(plan.micro_batch, cuda=gpu.cuda, half=plan.precision != "fp32")
        each = Span(*(plan.micro_batch / one for one in (max(seconds), min(seconds))))
        compute = self.config.compute
        machine = Machine(gpu, compute.nodes, compute.nproc_per_node)
        speed = of_all_ranks(each, machine)
        return replace(
            plan,
            records_per_second=speed,
            speed_from=f"{len(seconds)} steps on this machine",
            hours=self._hours(speed, plan.steps),
        )

    def _hours(self, speed: Span, steps: int) -> Span:
        records = steps * self.config.training.global_batch_size
        return Span(records / speed.high / 3600, records / speed.low / 3600)

    @staticmethod
    def _price(machine: Machine) -> float | None:
        price = machine.gpu.usd_per_hour
        return None if price is None else price * machine.ranks

    def _name(self, model: Any) -> str:
        given = self.config.model
        kind = given.config.get("architecture") or given.config.get("model_type")
        return str(given.base or kind or type(model).__name__)

    def _remarks(self, model: torch.nn.Module) -> Iterator[str]:
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        attentions = [
            config._attn_implementation
            for config in configs
            if hasattr(config, "num_attention_heads") and config._attn_implementation
        ]
        if attentions:
            asked, found = self.config.training.attention, ", ".join(dict.fromkeys(attentions))
            why = ", as Transformers has it for this model" if asked == "auto" else ""
            yield f"training.attention {asked}: it computes by {found}{why}"
        if "input_ids" in self.batch(1):
            yield f"texts count with data.sequence_length, {self.data.sequence_length} tokens"
        if self.config.compute.strategy not in ("auto", "single", "ddp"):
            yield f"compute.strategy = {self.config.compute.strategy} is not part of this plan"

    def batch(self, records: int) -> Batch:
        """Return a micro-batch of the first rows; texts are as long as they may be."""
        places = itertools.islice(itertools.cycle(range(len(self.rows))), records)
        result: Batch = self.task.collate([self.rows[index] for index in places])
        for name in ("input_ids", "attention_mask"):
            if name in result:
                result[name] = torch.ones(records, self.data.sequence_length, dtype=torch.int64)
        return result

    def peak(self, records: int, *, half: bool, accumulates: bool = False) -> Peak:
        """Return the peak of a step with a micro-batch of so many records.

        Raises:
            BadInput: fakes cannot run the model.
        """
        key = (records, half, accumulates)
        if key not in self._peaks:
            batch = self.batch(records)
            try:
                with warnings.catch_warnings(action="ignore"):
                    self._peaks[key] = self._peak(batch, half=half, accumulates=accumulates)
            except BadInput:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise BadInput(
                    f"the dry run of this model fails: {reason}", remedy="try a few training steps"
                ) from error
        return self._peaks[key]

    def _peak(self, batch: Batch, *, half: bool, accumulates: bool) -> Peak:
        live = LiveTensors(lambda *_: "activations")
        # Constructors compute a few numbers, which fakes do not.
        with torch.device("meta"):
            model: Any = self.task.build_model()
        with fake_mode(), live:
            fake(model)
            if self.config.training.gradient_checkpointing:
                recompute_activations(model, configured=True)
            model.train()
            for tensor in (*model.parameters(), *model.buffers()):
                live.rename(tensor, "weights")
            there = {name: torch.empty_like(value) for name, value in batch.items()}
            for value in there.values():
                live.rename(value, "batch")
            optimizer = _with_state(model, live, self._optimizer(), accumulates=accumulates)
            live.begin()
            flops = FlopCounterMode(display=False)
            with flops:
                live.now = _FORWARD
                loss = self._loss(model, there, half=half)
                live.now = _BACKWARD
                loss.backward()  # type: ignore[no-untyped-call]
            live.now = _UPDATE
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        moment = max(live.peaks, key=lambda one: sum(live.peaks[one].values()))
        return Peak(moment, dict(live.peaks[moment]), float(flops.get_total_flops()))

    def _optimizer(self) -> TrainingConfig:
        """Return the settings of training, with a rate that changes neither memory nor time."""
        return self.config.training.model_copy(update={"learning_rate": 1e-5})

    def _loss(self, model: Any, batch: Batch, *, half: bool) -> torch.Tensor:
        device = next(model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss: torch.Tensor = self.task.compute_loss(model, batch).total
        return loss

    def step_seconds(self, records: int, *, cuda: bool, half: bool) -> list[float]:
        """Return the seconds of real steps with a micro-batch and an update each."""
        compute = self.config.compute
        if not cuda:
            torch.set_num_threads(threads_of_each(compute.nproc_per_node, compute.threads_per_rank))
        device = torch.device("cuda" if cuda else "cpu")
        model: Any = self.task.build_model()
        model.to(device).train()
        if self.config.training.gradient_checkpointing:
            recompute_activations(model, configured=True)
        optimizer = OptimizerBuilder(self._optimizer())(model)
        seconds = []
        for _ in range(_STEPS + 1):
            began = time.perf_counter()
            batch = to_device(self.batch(records), device)
            self._loss(model, batch, half=half).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]


def _with_state(
    model: torch.nn.Module, live: LiveTensors, training: TrainingConfig, *, accumulates: bool
) -> torch.optim.Optimizer:
    """Return an optimizer after its first update; keep the gradients if they accumulate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
        live.rename(parameter.grad, "gradients")
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: live.rename(parameter.grad, "gradients")
        )
    optimizer = OptimizerBuilder(training)(model)
    optimizer.step()
    for state in optimizer.state.values():
        for tensor in state.values():
            live.rename(tensor, "optimizer")
    if not accumulates:
        optimizer.zero_grad()
    return optimizer
