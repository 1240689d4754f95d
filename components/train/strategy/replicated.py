"""Each rank has the whole model: one rank alone, or PyTorch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.snapshot import Piece, cut
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.strategy.base import Strategy

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Replicated(Strategy):
    """By accelerate: the device, DDP, and the scaler of float16."""

    def __init__(
        self, accelerator: Accelerator, module: torch.nn.Module, make_optimizer: MakeOptimizer
    ) -> None:
        self.accelerator, self.module = accelerator, module
        # The optimizer is made from the model on its device.
        self.model = accelerator.prepare(module)
        self.optimizer = make_optimizer(module)
        self._wrapped = accelerator.prepare(self.optimizer)

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last:
            return contextlib.nullcontext()
        waiting: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return waiting

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, limit: float) -> float:
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))

    def update(self) -> None:
        self._wrapped.step()
        self._wrapped.zero_grad()

    @property
    def skipped(self) -> bool:
        return bool(self._wrapped.step_was_skipped)

    @property
    def scale(self) -> float:
        scaler = self.accelerator.scaler
        return 0.0 if scaler is None else float(scaler.get_scale())

    def settings(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {**super().settings(), "scaler": None if scaler is None else scaler.state_dict()}

    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        # Each rank's own: what batch normalisation has seen, for one.
        buffers = {name for name, _ in self.module.named_buffers()}
        return {
            "model": cut(model_tensors(self.module), rank, world, on_first=buffers),
            "optimizer": cut(optimizer_tensors(self.module, self.optimizer), rank, world),
        }

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        restore_model(self.module, checkpoint.tensors("model"))
        tensors = checkpoint.tensors("optimizer")
        restore_optimizer(self.module, self.optimizer, tensors, settings["groups"])
        if self.accelerator.scaler is not None and settings["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(settings["scaler"])
