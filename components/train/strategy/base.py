"""The interface between the training loop and every strategy, and the choice of one."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.optimizers import OptimizerSpec
from steadytrain.components.shared.config.strategies import Offload, StrategySpec, strategy_spec
from steadytrain.components.train.checkpoint.state import optimizer_settings

if TYPE_CHECKING:
    from steadytrain.components.train.checkpoint import Checkpoint
    from steadytrain.components.train.checkpoint.snapshot import Piece, Region


class Timer:
    """Adds up time spans, each between `begin` and `end`, or as a context.

    On a GPU, it uses events of the CUDA stream, which runs behind the Python program: what counts
    is how long the stream takes, not the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda: Final = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        self._spans.append((self._began, self._now()))

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def take(self) -> float:
        """Return the seconds of all spans since the last call. On a GPU, wait for their end."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return float(sum(end - began for began, end in spans))
        for _, end in spans[-1:]:
            end.synchronize()
        return float(sum(began.elapsed_time(end) for began, end in spans)) / 1000

    def take_finished(self) -> float:
        """Return the seconds of the spans that are over, without waiting. The others stay."""
        if not self._cuda:
            return self.take()
        over = [span for span in self._spans if span[1].query()]
        self._spans = [span for span in self._spans if span not in over]
        return float(sum(began.elapsed_time(end) for began, end in over)) / 1000

    def _now(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class MakeOptimizer(Protocol):
    """Creates the optimizer from the model in its final form on this rank."""

    @property
    def spec(self) -> OptimizerSpec: ...

    def __call__(self, model: torch.nn.Module, /) -> torch.optim.Optimizer: ...


class Strategy(ABC):
    """A model and its optimizer on the ranks of this world.

    module: the task's own model.
    model: the model that forward passes use.
    optimizer: its parameter groups hold the learning rates.
    optimizer_spec: what it keeps for each parameter.
    spec: what it shards. It may differ from the configured strategy: a single rank shards nothing.
    waits: adds up how long this rank waits for the others' gradients. None if it never waits, or if
        the ranks synchronize throughout the step, so no single wait can be measured.
    """

    spec: StrategySpec
    module: torch.nn.Module
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_spec: OptimizerSpec
    waits: Timer | None = None

    @property
    def shares_weights(self) -> bool:
        """Whether no rank has the full model. Every forward pass then needs all ranks."""
        return "weights" in self.spec.shards

    def full_model(self) -> torch.nn.Module | None:
        """Return the model with its exact weights; None if the ranks share a part of the state.

        Ranks that only shard the optimizer's state may keep weights of a lower precision.
        """
        return None if self.spec.shards else self.module

    @abstractmethod
    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the forward and backward pass of a micro-batch.

        Args:
            last: whether an update follows it.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, averaged over the ranks."""

    @abstractmethod
    def clip(self, limit: float) -> float | None:
        """Clip the gradients. Return the norm over all ranks before clipping.

        Args:
            limit: largest norm afterwards; infinite leaves the gradients unchanged.

        Returns:
            None if only the update computes the norm.
        """

    @abstractmethod
    def update(self) -> float | None:
        """Update the weights and clear the gradients.

        Returns:
            The norm, if `clip` could not return it.
        """

    @property
    def repeats(self) -> bool:
        """Whether a step that failed before its update can be repeated without its gradients.

        Not with several ranks: a rank that fails in its backward pass leaves the others in a
        collective, which waits for it. Nor if the state is sharded: the library counts finished
        micro-batches, and stores their gradients elsewhere.
        """
        return False

    @property
    def skipped(self) -> bool:
        """Whether the last update was skipped because a gradient overflowed."""
        return False

    @property
    def scale(self) -> float:
        """Factor on the loss that keeps gradients from underflowing; 0 without a scaler."""
        return 0.0

    def settings(self) -> dict[str, Any]:
        """Return the non-tensor optimizer state as plain data: learning rates and so on."""
        return {"groups": optimizer_settings(self.optimizer), "scaler": None}

    @abstractmethod
    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        """Return what this rank saves of the state, by part: "model", "optimizer"."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        """Restore a checkpoint, written by any strategy and any number of ranks.

        Args:
            settings: what `settings` returned then; other keys are ignored.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written, or is of another model.
        """

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of each trained weight, by name, without gradients.

        What the mapping returns now has the current values; do not keep the tensors themselves.
        Parts that are not the full weight may be flat.
        """

    @abstractmethod
    def moments(self, key: str) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of a tensor in the optimizer's state, by the weight's name.

        It has the shape of the same weight in `weights`. A weight that was never updated has none.
        """

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of each trained weight's gradient, by the weight's name.

        Between `clip` and `update`, on all ranks. A strategy that keeps its gradients elsewhere
        overrides this, or has "training.monitor.layers" in `StrategySpec.unsupported`.
        """
        named = self.module.named_parameters()
        return {name: item.grad for name, item in named if item.grad is not None}

    @abstractmethod
    def weight_pieces(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> list[Piece]:
        """Return what this rank saves of tensors with the names and shapes of `weights`.

        Args:
            suffix: appended to the name of the weight.
        """

    @abstractmethod
    def weight_regions(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> dict[str, Region]:
        """Return the regions of such tensors, to restore them from a checkpoint."""

    @contextlib.contextmanager
    def exchanged(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Exchange weights with tensors of their names and shapes, and back at the end."""
        self._exchange(tensors)
        try:
            yield
        finally:
            self._exchange(tensors)

    @torch.no_grad()
    def _exchange(self, tensors: Mapping[str, torch.Tensor]) -> None:
        weights = self.weights()
        for name, tensor in tensors.items():
            # One at a time, so that the memory for a copy is that of the largest weight.
            held = weights[name].clone()
            weights[name].copy_(tensor)
            tensor.copy_(held)
        self._spread()

    @abstractmethod
    def _spread(self) -> None:
        """Make forward passes use the changed `weights`."""


def apply_strategy(
    config: RunConfig,
    accelerator: Accelerator,
    module: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    strategy: str,
    offload: str = "none",
) -> Strategy:
    """Set up the model and its optimizer on this world's ranks.

    A single rank has nobody to share with, so it is replicated, unless part of the state is
    offloaded to host memory.

    Args:
        make_optimizer: creates the optimizer from the model in its final form on this rank.
        strategy, offload: as in `compute`, but never "auto".
    """
    alone = accelerator.num_processes == 1
    spec = strategy_spec(REPLICATED if alone and offload == "none" else strategy)
    if alone and spec.shards:
        _join_a_group_of_one()
    applied = cast(
        Strategy,
        spec.build(config, accelerator, module, make_optimizer, offload=cast(Offload, offload)),
    )
    applied.spec = spec
    return applied


def _join_a_group_of_one() -> None:
    """Create a process group of one rank: sharding needs it, and accelerate does not create it."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)
