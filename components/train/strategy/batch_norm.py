"""Batch normalization over the micro-batches of all ranks, so that more ranks learn the same.

On a GPU, PyTorch's SyncBatchNorm does this. It refuses a CPU, where the statistics are summed by
differentiable exchanges, by the same formula (Ioffe and Szegedy 2015).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNorm

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
        apart = values - mean.view(shape)
        variance = all_reduce(apart.square().sum(places)) / total  # type: ignore[no-untyped-call]
        self._note(mean, variance * total / (total - 1))
        found = apart * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        done: torch.Tensor = found.to(input.dtype)
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
        found: torch.Tensor = self.act(self.drop(super().forward(input)))
        return found


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
    on_cpu, found, left = device.type == "cpu", 0, set[str]()
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
            found += 1
    remarks = []
    if found:
        remarks.append(
            f"{found} layers of batch normalization take their statistics from the micro-batches "
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
