"""What is trained with a model but is no part of it, and so is not exported."""

from __future__ import annotations

from typing import Any

import torch


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
