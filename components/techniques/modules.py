"""Models as modules: run one without training it, and add one that is trained but not exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from steadytrain.components.techniques.base import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device. Other values stay the same."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, the model runs without dropout and gradients.

    Afterward, its mode is the same as before.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


class Auxiliary(torch.nn.Module):
    """A module of the model that works within its forward pass.

    DDP, FSDP and ZeRO-3 exchange and gather its parameters only if the forward pass uses them.
    """

    def answer(self, model: torch.nn.Module, inputs: object, output: Any) -> Any:
        """Change what the model returns: a forward hook.

        FSDP takes outputs apart and rebuilds them, so only fields that they already have survive.
        """
        raise NotImplementedError


def attach_auxiliary(model: Any, name: str, part: Auxiliary) -> None:
    """Make `part` a child of the model. Exports of Transformers' models leave it out."""
    model.add_module(name, part)
    model.register_forward_hook(part.answer)
    names = [f"{name}.{parameter}" for parameter, _ in part.named_parameters()]
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *names}
