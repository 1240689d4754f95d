"""Time and cost of a training run, as intervals; speeds from the table are not measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from steadytrain.components.memory.setting import FrozenModel, Setting
from steadytrain.components.memory.shape import Shape
from steadytrain.components.memory.states import still_layers, trained_parameters
from steadytrain.components.memory.techniques import grader_of
from steadytrain.components.shared.chunks import SCORED_TOKENS
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.hardware import TFLOPS_OF_A_UNIT
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Machine, Workload

UTILIZATION: Final = (0.25, 0.45)
"""Share of a GPU's peak that training a transformer reaches (model FLOPs utilization). An
assumption based on published numbers: torchtitan's 8B on 8 H100 28 %, llm-foundry's 1B on A100
42 %, nanochat 46 %."""
_NODE: Final = 0.9
_NODES: Final = 0.8
"""Slow ends of each rank's remaining share of speed within a node (two ranks were measured at 0.89
of one, on a CPU) and across nodes (an assumption)."""
_OFFLOADING: Final = {"none": 1.0, "optimizer": 0.5, "all": 0.25, "disk": 0.1}
_UNPACKING: Final = 0.7
"""Slow ends with offloading, and with weights unpacked from 4 bits: assumptions."""
_COPIED_BYTES_PER_SECOND: Final = 5e9
_RESTART_SECONDS: Final = 120.0
"""Assumed cost of copying a checkpoint to host memory, and of restarting on another node."""
THE_TABLE: Final = "the table"
ASSUMED: Final = "assumed for this machine's cores; --calibrate measures it"
_ONLY_PRODUCTS: Final = 0.6
"""Time of a FLOP in an optimizer's update, which is nothing but matrix products, relative to one in
a pass. Fitted to one model on a CPU (tests/bench/test_steps.py)."""


@dataclass(frozen=True)
class _OnLogits:
    """Elementwise work on each logit of a language model, as FLOPs that take as long.

    plain: of cross-entropy. focal_loss, r_drop: what these do in addition, block by block.
    """

    plain: float
    focal_loss: float
    r_drop: float


_ON_A_CPU: Final = _OnLogits(1100, 550, 1270)
"""Fitted to two models with different vocabularies (tests/bench/test_robust_training.py). A GPU's
ratio of arithmetic to bandwidth is about the same in 32 bits."""
_ON_A_GPU: Final = _OnLogits(550, 3850, 7700)
"""An assumption: 10, 70 and 140 bytes of memory traffic, counted from the operators, and 55 FLOPs
per byte of traffic: an A100 with 312 TFLOPS at 35 % utilization and 2 TB/s."""


@dataclass(frozen=True)
class Span:
    """An interval with a low and a high end."""

    low: float
    high: float

    @classmethod
    def of(cls, value: float) -> Span:
        """Return one value as an interval."""
        return cls(value, value)

    @property
    def middle(self) -> float:
        """The geometric mean, because the ends differ by a factor."""
        return math.sqrt(self.low * self.high)

    def times(self, factor: float) -> Span:
        return Span(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Speed:
    """The speed of a training run.

    tokens_per_second: of all ranks together.
    source: where the speed comes from.
    """

    tokens_per_second: Span
    source: str


@dataclass(frozen=True)
class Preemptions:
    """What spot nodes add, with checkpoints at Young's interval.

    checkpoint_seconds: how long training stops for a checkpoint.
    interval_seconds: between checkpoints.
    factor: relative to the time without preemptions.
    """

    checkpoint_seconds: float
    interval_seconds: float
    factor: float


def flops_per_token(shape: Shape, setting: Setting) -> float:
    """Return the FLOPs per token of forward and backward.

    Two per parameter forward and twice that backward, 6N + 12LHQT with attention (Chowdhery et al.
    2022, "PaLM", appendix B). Frozen weights need no gradients, which saves a third. Recomputing
    activations adds a forward pass (Korthikanti et al. 2022, section 5), and so does a teacher.
    R-Drop passes each token twice, and adversarial training several times. Its search for a
    perturbation needs no gradients of weights, but a language model's head computes its own with
    the loss. What R-Drop and the focal loss do with the logits of a language model counts as the
    FLOPs that take as long. Tokens without a target have no logits. Layers that are frozen, with
    all before them, have a forward pass only.
    """
    matrices = sum(matrix.size for matrix in shape.matrices) + shape.used
    layer = 2.0 * matrices + 4.0 * shape.attention * setting.length
    head = shape.hidden * (shape.labels or shape.vocabulary * setting.targets)
    forward = shape.layers * layer + 2.0 * head
    again = 1 if setting.recompute else 0
    units = setting.passes * ((2 if setting.adapter.freezes else 3) + again)
    units += setting.ascents * (2 + again)
    adapters = 6.0 * trained_parameters(shape, setting) if setting.adapter.freezes else 0.0
    teacher = setting.frozen_model.flops if setting.frozen_model else 0.0
    flops = units * forward + setting.passes * adapters
    flops -= (units - 1) * still_layers(shape, setting) * layer
    if not (shape.labels or setting.adapter.freezes):
        flops += setting.ascents * 2.0 * head
    passes = setting.passes + setting.ascents
    flops += passes * _on_logits(shape, setting, flops / passes)
    return setting.copies * flops + passes * teacher


def _on_logits(shape: Shape, setting: Setting, products: float) -> float:
    """Return what R-Drop or the focal loss add for the logits of a token, in FLOPs.

    The utilization that speeds are from includes what the plain loss does with its logits, so the
    same FLOPs take longer by that share.

    Args:
        products: FLOPs of the token's matrix products, in one pass.
    """
    if shape.labels or not setting.differentiates:
        return 0.0
    each = _ON_A_GPU if setting.cuda and setting.half else _ON_A_CPU
    logits = shape.vocabulary * setting.targets
    added = logits * (each.r_drop if setting.copies > 1 else each.focal_loss)
    return added * products / (products + logits * each.plain)


def update_flops(job: Workload, choice: Choice) -> float:
    """Return the FLOPs of a pass that take as long as the updates, for each token of a rank.

    Each rank updates all of its weights once per global batch, however few tokens that has.
    """
    shape, setting = job.shape, choice.setting
    each = optimizer_spec(setting.optim).update_flops
    if each is None or setting.adapter.freezes:
        return 0.0
    training = job.config.training
    layer = sum(each(matrix.outputs, matrix.inputs, training) for matrix in shape.matrices)
    tokens = choice.batch.gradient_accumulation_steps * setting.micro_batch * setting.length
    return _ONLY_PRODUCTS * (shape.layers - shape.still) * layer / tokens


Timing = Callable[[Workload, Choice], Speed]
"""Returns how fast a choice is."""


def by_table(job: Workload, choice: Choice) -> Speed:
    """Return the speed that the table's GPU, or this machine's CPU, is assumed to reach."""
    work = flops_per_token(job.shape, choice.setting) + update_flops(job, choice)
    source = THE_TABLE if job.machine.gpu.cuda else ASSUMED
    return Speed(tokens_per_second(work, choice.setting, job.machine), source)


def of_all_ranks(each: Span, machine: Machine) -> Span:
    """Return the speed of all ranks from that of one; at the low end ranks wait for each other."""
    left = 1.0 if machine.ranks == 1 else _NODES if machine.nodes > 1 else _NODE
    return Span(each.low * machine.ranks * left, each.high * machine.ranks)


def tokens_per_second(work: float, setting: Setting, machine: Machine) -> Span:
    """Return the tokens per second of all ranks together.

    Args:
        work: FLOPs of a token.
    """
    gpu = machine.gpu
    peak = gpu.half_tflops if setting.half else gpu.fp32_tflops
    sustained = min(peak, gpu.speed * TFLOPS_OF_A_UNIT)
    slow = sustained * UTILIZATION[0] * _OFFLOADING[setting.offload]
    if setting.adapter.kind == "qlora":
        slow *= _UNPACKING
    rate = 1e12 / work
    return of_all_ranks(Span(slow * rate, peak * UTILIZATION[1] * rate), machine)


def hours(speed: Span, tokens: float) -> Span:
    """Return the hours that training on `tokens` tokens needs."""
    return Span(tokens / speed.high / 3600, tokens / speed.low / 3600)


def preemptions(job: Workload, choice: Choice) -> Preemptions:
    """Return the overhead of preemptions for the configured expected time between failures.

    A checkpoint takes C seconds and follows every sqrt(2CM) seconds. Every M seconds, half an
    interval and a restart are lost (Young 1974; Daly 2006).
    """
    trained = trained_parameters(job.shape, choice.setting)
    cost = 12 * trained / job.machine.ranks / _COPIED_BYTES_PER_SECOND
    between = job.config.recovery.seconds_between_failures
    interval = math.sqrt(2 * cost * between)
    lost = (interval / 2 + _RESTART_SECONDS) / between
    return Preemptions(cost, interval, 1 + cost / interval + lost)


@dataclass(frozen=True)
class Scoring:
    """A curriculum's reference model's pass over the training rows, before the first step.

    memory: bytes of a rank at its peak. The model that trains does not exist yet.
    tokens: of training that take as long; None if the data are not prepared.
    """

    memory: int
    tokens: float | None


def scoring_of(job: Workload, choice: Choice) -> Scoring | None:
    """Return what a reference model's pass needs; None without a curriculum by loss.

    Raises:
        BadInput: the reference model's architecture is unknown, or can't be built here.
    """
    setting = choice.setting
    model = grader_of(job.config, half=setting.half, length=setting.length)
    if model is None:
        return None
    rows = max(SCORED_TOKENS, setting.length)
    return Scoring(model.alone(rows), pass_tokens(job, setting, model))


def pass_tokens(job: Workload, setting: Setting, model: FrozenModel) -> float | None:
    """Return the tokens of training that take as long as the model's pass over the training rows.

    None if the data are neither prepared nor sampled.
    """
    data, sampled = prepared(job.config), job.sampled
    if data is not None:
        side = data.sides["train"]
        tokens: float = side.tokens or side.rows * setting.length
    elif sampled is not None and sampled.rows is not None and sampled.tokens is not None:
        tokens = sampled.rows * sampled.tokens
    else:
        return None
    return tokens * model.flops / flops_per_token(job.shape, setting)
