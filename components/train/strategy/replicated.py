"""Each rank has the full model: a single rank, or PyTorch's DistributedDataParallel.

DDP can compress gradients by PyTorch's hooks. PowerSGD (Vogels et al. 2019) adds what a step's
compression lost to the next gradient. That error differs by rank, so each rank saves its own.

Batch normalization is over the micro-batches of all ranks, so that more ranks learn the same. On a
GPU, PyTorch's SyncBatchNorm does this. It refuses a CPU, where the statistics are summed by
differentiable exchanges, by the same formula (Ioffe and Szegedy 2015).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from accelerate import Accelerator
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from steadytrain.components.techniques.gradient_compression import CompressionConfig
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.snapshot import Piece, Region, cut, full_piece, whole
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.strategy.base import MakeOptimizer, Strategy, Timer

PART: Final = "compression"
"""The part of a checkpoint."""


class Compression:
    """The hook of a DDP model, and its state on this rank.

    Args:
        device: where the gradients are.
        rank, world_size: of this process.
    """

    def __init__(
        self,
        config: CompressionConfig,
        model: DistributedDataParallel,
        *,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self.device, self.rank, self.world_size = device, rank, world_size
        self._state: PowerSGDState | None = None
        if config.kind == "bf16":
            model.register_comm_hook(None, bf16_compress_hook)
        elif config.kind == "powersgd":
            self._state = PowerSGDState(
                None,
                matrix_approximation_rank=config.rank,
                start_powerSGD_iter=config.start,
                # Columns of zeros, as of embeddings that no batch has used, have no direction.
                orthogonalization_epsilon=1e-8,
            )
            model.register_comm_hook(self._state, _in_order)

    def settings(self) -> dict[str, Any]:
        """Return the rest of the state as plain data, equal on all ranks."""
        iteration = 0 if self._state is None else self._state.iter
        return {"iteration": iteration, "world_size": self.world_size}

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank saves."""
        errors = self._tensors(f"error-{self.rank}")
        # After the exchange, the factors are equal on all ranks.
        shared = self._tensors("p", "q") if self.rank == 0 else {}
        return [full_piece(name, tensor) for name, tensor in {**errors, **shared}.items()]

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        """Restore a checkpoint. With another number of ranks, only the iteration continues.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written.
        """
        if self._state is None:
            return
        self._state.iter = settings["iteration"]
        if settings["world_size"] != self.world_size:
            return
        errors = {}
        for name, saved in checkpoint.outline(PART).items():
            kind, _, bucket = name.rpartition("-")
            # Not the other ranks' errors: each is as large as the gradients.
            if kind in self._named():
                errors[name] = torch.empty_like(saved, device=self.device)
                self._named()[kind][int(bucket)] = errors[name]
        checkpoint.copy_into(PART, {name: whole(tensor) for name, tensor in errors.items()})

    def _named(self) -> Mapping[str, dict[int, torch.Tensor]]:
        if self._state is None:
            return {}
        return {
            f"error-{self.rank}": self._state.error_dict,
            "p": self._state.p_memory_dict,
            "q": self._state.q_memory_dict,
        }

    def _tensors(self, *kinds: str) -> dict[str, torch.Tensor]:
        return {
            f"{kind}-{bucket}": tensor
            for kind, tensors in self._named().items()
            if kind in kinds
            for bucket, tensor in tensors.items()
        }


def _in_order(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects postponed annotations
    """Compress and exchange a bucket before the next one.

    A bucket takes three exchanges, each from a callback of the one before. With gloo, callbacks of
    several buckets run in an order that differs by rank, and ranks would mix up the exchanges. On a
    GPU, waiting does not block: the exchanges are queued in order anyway.
    """
    exchanged = powerSGD_hook(state, bucket)
    exchanged.wait()
    return exchanged


_BUCKETS: Final = 8
"""Number of buckets for exchanging a small model's gradients.

With DDP's 25 MB, most gradients would be in the last bucket, whose exchange no computation hides.
Much smaller buckets cost more because there are so many of them.
"""
_DEFAULT_MB: Final = 25


class Replicated(Strategy):
    """Uses accelerate for the device, DDP, and the float16 scaler.

    Args:
        compression: how several ranks compress the gradients that they exchange.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        compression: CompressionConfig,
    ) -> None:
        self.accelerator, self.module = accelerator, module
        # Parameters may be frozen at first, and these are all that are ever trained.
        self._trained = [name for name, item in module.named_parameters() if item.requires_grad]
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.bucket_cap_mb = bucket_mb(module)
            # Otherwise, rank 0 would broadcast identical buffers at the start of every step.
            accelerator.ddp_handler.broadcast_buffers = learns_in_buffers(module)
        # Create the optimizer after the model is on its device.
        prepared: Any = accelerator.prepare(module)
        self.model = prepared
        self.optimizer, self.optimizer_spec = make_optimizer(module), make_optimizer.spec
        self._wrapped = accelerator.prepare(self.optimizer)
        self._exchanges = False
        self._compression: Compression | None = None
        if accelerator.num_processes > 1:
            self.waits = Timer(accelerator.device)
            if compression.on:
                self._compression = Compression(
                    compression,
                    prepared,
                    device=accelerator.device,
                    rank=accelerator.process_index,
                    world_size=accelerator.num_processes,
                )

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        self._exchanges = last
        if last:
            return contextlib.nullcontext()
        waiting: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return waiting

    def backward(self, loss: torch.Tensor) -> None:
        if self.waits is None or not self._exchanges:
            self.accelerator.backward(loss)
            return
        loss.register_hook(self._at_its_end)  # type: ignore[no-untyped-call]
        self.accelerator.backward(loss)
        self.waits.end()

    def _at_its_end(self, _: torch.Tensor) -> None:
        """Start the wait after the backward pass, before DDP waits for all ranks' gradients."""
        assert self.waits is not None
        Variable._execution_engine.queue_callback(self.waits.begin)

    def clip(self, limit: float) -> float:
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))

    def update(self) -> None:
        self._wrapped.step()
        self._wrapped.zero_grad()

    @property
    def repeats(self) -> bool:
        return int(self.accelerator.num_processes) == 1

    @property
    def skipped(self) -> bool:
        return bool(self._wrapped.step_was_skipped)

    @property
    def scale(self) -> float:
        scaler = self.accelerator.scaler
        return 0.0 if scaler is None else float(scaler.get_scale())

    def settings(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        compression = {} if self._compression is None else {PART: self._compression.settings()}
        scaled = None if scaler is None else scaler.state_dict()
        return {**super().settings(), "scaler": scaled, **compression}

    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        # Buffers may differ between ranks, for example what a task's own layers count.
        buffers = {name for name, _ in self.module.named_buffers()}
        state = optimizer_tensors(self.module, self.optimizer, self.optimizer_spec)
        result: dict[str, Sequence[Piece]] = {
            "model": cut(model_tensors(self.module), rank, world, on_first=buffers),
            "optimizer": cut(state, rank, world),
        }
        if self._compression is not None:
            result[PART] = self._compression.pieces()
        return result

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        restore_model(self.module, checkpoint)
        restore_optimizer(
            self.module, self.optimizer, self.optimizer_spec, checkpoint, settings["groups"]
        )
        if self.accelerator.scaler is not None and settings["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(settings["scaler"])
        if self._compression is not None and PART in settings:
            self._compression.restore(checkpoint, settings[PART])

    def weights(self) -> Mapping[str, torch.Tensor]:
        named = dict(self.module.named_parameters())
        return {name: named[name].detach() for name in self._trained}

    def moments(self, key: str) -> Mapping[str, torch.Tensor]:
        named, state = self.module.named_parameters(), self.optimizer.state
        return {name: state[item][key] for name, item in named if key in state.get(item, {})}

    def weight_pieces(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> list[Piece]:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return cut({f"{name}{suffix}": item for name, item in tensors.items()}, rank, world)

    def weight_regions(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> dict[str, Region]:
        return {f"{name}{suffix}": whole(item) for name, item in tensors.items()}

    def _spread(self) -> None:
        """Do nothing: forward passes use these tensors."""


def learns_in_buffers(module: torch.nn.Module) -> bool:
    """Return whether a buffer is part of the model's state, as in batch normalization.

    Other buffers are constants, or recomputed from each batch, such as rotary embeddings'
    frequencies.
    """
    kept = module.state_dict().keys()
    return any(name in kept for name, _ in module.named_buffers())


def bucket_mb(module: torch.nn.Module) -> int | None:
    """Return the MiB of gradients per DDP bucket. None means DDP's default, for large models."""
    trained = (item for item in module.parameters() if item.requires_grad)
    share = sum(item.numel() * item.element_size() for item in trained) // _BUCKETS // 2**20
    return max(1, share) if share < _DEFAULT_MB else None


_ACTIVATED: Final = "BatchNormAct2d"
"""timm's layer, which ends with dropout and an activation."""


class SummedBatchNorm(_BatchNorm):
    """SyncBatchNorm for a CPU. Input and output are (rows, channels, ...)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as PyTorch names it
        if not self.training:
            return super().forward(input)
        from torch.distributed.nn.functional import all_reduce

        places, shape = [0, *range(2, input.dim())], (1, -1, *[1] * (input.dim() - 2))
        values, count = input.float(), torch.tensor([input.numel() / input.shape[1]])
        sums = all_reduce(torch.cat((values.sum(places), count)))  # type: ignore[no-untyped-call]
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        deviations = values - mean.view(shape)
        variance = all_reduce(deviations.square().sum(places)) / total  # type: ignore[no-untyped-call]
        self._note(mean, variance * total / (total - 1))
        normalized = deviations * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        done: torch.Tensor = normalized.to(input.dtype)
        return done

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  as PyTorch names it
        """Take any number of dimensions, as SyncBatchNorm does."""

    @torch.no_grad()
    def _note(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics towards those of a micro-batch of all ranks."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Activated(torch.nn.Module):
    """Ends as timm's layer does."""

    drop: torch.nn.Module
    act: torch.nn.Module

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as PyTorch names it
        result: torch.Tensor = self.act(self.drop(super().forward(input)))
        return result


class _ActivatedSynced(_Activated, torch.nn.SyncBatchNorm):
    pass


class _ActivatedSummed(_Activated, SummedBatchNorm):
    pass


def synchronize(model: torch.nn.Module, device: torch.device) -> list[str]:
    """Let the layers of batch normalization share statistics. Parameters keep their names.

    Args:
        device: where the model will be.

    Returns:
        Remarks: what the model learns from now on, and which layers keep statistics of each rank.
    """
    on_cpu, layers, left = device.type == "cpu", 0, set[str]()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (BatchNorm1d, BatchNorm2d, BatchNorm3d):
                kind: Any = SummedBatchNorm if on_cpu else torch.nn.SyncBatchNorm
            elif type(child).__name__ == _ACTIVATED:
                kind = _ActivatedSummed if on_cpu else _ActivatedSynced
            else:
                if isinstance(child, _BatchNorm):
                    left.add(f"{type(child).__module__}.{type(child).__name__}")
                continue
            setattr(parent, name, _synced(child, kind))
            layers += 1
    remarks = []
    if layers:
        remarks.append(
            f"{layers} layers of batch normalization take their statistics from the micro-batches "
            "of all ranks together"
        )
    if left:
        remarks.append(
            f"layers of batch normalization ({', '.join(sorted(left))}) take their statistics from "
            "the micro-batch of each rank alone, so that the number of ranks changes what is "
            "learned; the exported model has those of rank 0"
        )
    return remarks


def _synced(layer: Any, kind: Any) -> torch.nn.Module:
    """Return a layer with the parameters, the statistics and the settings of another one."""
    made = kind(layer.num_features, layer.eps, layer.momentum, layer.affine, device="meta")
    made.track_running_stats = layer.track_running_stats
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(made, name, getattr(layer, name))
    if isinstance(made, _Activated):
        made.drop, made.act = layer.drop, layer.act
    done: torch.nn.Module = made.train(layer.training)
    return done
