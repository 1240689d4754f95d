"""Attach low-rank adapters (PEFT), and store frozen parts outside the layers in less memory.

With linear layers in 4 bits, the embeddings and head are the largest part of a model with a large
vocabulary: 2.1 of 5.9 GB in Llama-3.1-8B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from steadytrain.components.shared.chunks import check_head_width
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.loaded_weights import (
    Bits,
    QuantizedMatrix,
    new_modules,
    product_type,
)
from steadytrain.components.techniques.modules import Auxiliary


class FrozenHead(torch.nn.Module):
    """Replaces a linear layer. It returns logits, and gradients of its input only.

    Args:
        device: device of the quantized head. The layer may still be in host memory.
    """

    def __init__(self, head: torch.nn.Linear, bits: Bits, device: torch.device) -> None:
        super().__init__()
        self.matrix = QuantizedMatrix(head.weight, bits, device)
        bias = None if head.bias is None else head.bias.detach().to(device)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as a linear layer has it
        dtype = product_type(input.device, self.matrix.dtype)
        logits: torch.Tensor = _Product.apply(input, self.matrix, dtype)
        return logits if self.bias is None else logits + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """Unpacks the matrix again in backward, instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, matrix: QuantizedMatrix, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.matrix, ctx.like = matrix, (hidden.shape, hidden.dtype)
        product = matrix.product(hidden.flatten(0, -2).to(dtype))
        return product.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shape, dtype = ctx.like
        product = ctx.matrix.transposed_product(outputs[0].flatten(0, -2))
        return product.view(shape).to(dtype), None, None


# A frozen embedding table in host memory.
#
# The device holds only the rows of a micro-batch, not the table
# (`model.adapter.frozen_embeddings`).


class HostEmbedding(torch.nn.Module):
    """Replaces an embedding layer, with the same values.

    The table is not a parameter. Moving the module doesn't move it, ranks don't synchronize it, and
    it is not in the module's state dict.

    shape: (words, width). embedding_dim: the width, as an embedding has it.
    """

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.table = embedding.weight.detach().cpu()
        self.shape = self.table.shape
        self.embedding_dim = self.shape[1]

    # A lookup on a different device breaks a compiled graph anyway.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as an embedding has it
        return functional.embedding(input.cpu(), self.table).to(input.device)


_ON_HOST: Final = "model.adapter.frozen_embeddings = 'host'"


def lighten(model: Any, adapter: AdapterConfig) -> None:
    """Move the embeddings to the host and quantize the head, as configured.

    Calling it again changes nothing.

    Raises:
        BadInput: the model has no such parts, or they don't support this.
    """
    if not adapter.lightened:
        return
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    host = adapter.frozen_embeddings == "host" and not isinstance(embedding, HostEmbedding)
    bits = "as_loaded" if isinstance(head, FrozenHead) else adapter.frozen_head
    if not host and bits == "as_loaded":
        return
    outside = {id(part.weight) for part in (embedding, head) if hasattr(part, "weight")}
    inside = next(item for item in model.parameters() if id(item) not in outside)
    if host:
        _check_embedding(embedding)
    if host and bits == "as_loaded" and _are_one(model, embedding, head):
        raise BadInput(
            f"{_ON_HOST}: the head is the same table and would keep it on the device",
            remedy="set model.adapter.frozen_head to 8bit or 4bit, or frozen_embeddings to device",
        )
    if bits != "as_loaded":
        _check_head(head, bits)
        _replace(model, head, FrozenHead(head, bits, inside.device))
    if host:
        _replace(model, embedding, HostEmbedding(embedding))


def _part(model: Any, getter: str) -> Any:
    """Return a part of the model. None means that a user-defined model has no such part."""
    return getattr(model, getter)() if hasattr(model, getter) else None


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of values in the full model, whatever their bits and wherever they are."""
    packed_modules = [
        part for part in model.modules() if isinstance(part, QuantizedMatrix | HostEmbedding)
    ]
    packed = {id(item) for part in packed_modules for item in part.parameters()}
    packed |= {
        id(item)
        for part in model.modules()
        if isinstance(part, Auxiliary)
        for item in part.parameters()
    }
    # bitsandbytes keeps the original shape of packed layers.
    shapes = [
        item.quant_state.shape if hasattr(item, "quant_state") else item.shape
        for item in model.parameters()
        if id(item) not in packed
    ]
    shapes += [part.shape for part in packed_modules]
    return sum(map(math.prod, shapes))


def tied_tables(model: Any) -> set[str]:
    """Return the names of embeddings and head if they share one table, else nothing."""
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    if embedding is None or not _are_one(model, embedding, head):
        return set()
    return {name for name, child in model.named_modules() if child is embedding or child is head}


def _check_embedding(embedding: Any) -> None:
    if type(embedding) is not torch.nn.Embedding or embedding.max_norm is not None:
        raise BadInput(
            f"{_ON_HOST}: the model's embeddings are not a plain table but {_kind(embedding)}",
            remedy="set it to device",
        )


def _are_one(model: Any, embedding: Any, head: Any) -> bool:
    """Return whether the embeddings and the head share one table.

    Tied weights that were loaded to the host are two parameters with one tensor. A part that was
    moved to the host or quantized has no `weight`, and shares nothing.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    table = getattr(embedding, "weight", embedding)
    return head is not None and (tied or getattr(head, "weight", head) is table)


def _check_head(head: Any, bits: str) -> None:
    if type(head) is not torch.nn.Linear:
        raise BadInput(
            f"model.adapter.frozen_head = {bits!r}: the model's head is not a plain linear "
            f"layer but {_kind(head)}",
            remedy="leave it out",
        )
    check_head_width(head.in_features, bits)


def _kind(part: Any) -> str:
    return "None" if part is None else f"{type(part).__module__}.{type(part).__name__}"


def _replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def attach(module: torch.nn.Module, adapter: AdapterConfig) -> torch.nn.Module:
    """Return the model with adapters. Only they and new weights, such as a head, are trained.

    Raises:
        BadInput: the model has no such layers, or its frozen parts cannot be kept as configured.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.scale,
        lora_dropout=adapter.dropout,
        **adapted_parts(module, adapter.targets, new_modules(module)),
    )
    tied = tied_tables(module)
    try:
        adapted: torch.nn.Module = get_peft_model(module, config)
    except ValueError as error:
        raise BadInput(
            f"model.adapter.targets = {adapter.targets}: {error}",
            remedy="leave it out for all linear layers, or name layers that the model has",
        ) from error
    by_peft: Any = adapted.base_model
    shared = tied.intersection(by_peft.targeted_module_names)
    if shared:
        # Training would adapt one use of the table, but export adds the adapter to both uses.
        raise BadInput(
            f"model.adapter.targets = {adapter.targets}: {', '.join(sorted(shared))} shares its "
            "weights: the model's embeddings and head are one table",
            remedy="leave it out of the targets, or use a base whose two tables are separate",
        )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            # Otherwise a new head has the base model's 16 bits, which is too few for training.
            parameter.data = parameter.data.float()
    # A user-defined task may not have called this yet.
    lighten(adapted, adapter)
    return adapted


def adapted_parts(module: Any, targets: Any, new: Sequence[str]) -> dict[str, Any]:
    """Return the fields of LoraConfig that say what gets adapters, and what is trained itself.

    Args:
        targets: names of layers; None or empty for all linear ones.
        new: modules whose weights are not from a file.
    """
    heads = list(_heads(module))
    # Frozen, they would have other random values wherever the base is loaded.
    other = [name for name in new if name.partition(".")[0] not in heads]
    return {
        "target_modules": targets or _linear(module),
        "exclude_modules": other or None,
        "modules_to_save": [*heads, *other] or None,
    }


def quantized_modules(module: Any, names: Sequence[str]) -> list[str]:
    """Return which of these modules bitsandbytes holds in 4 or 8 bits."""
    kinds = ("Linear4bit", "Linear8bitLt")
    return [name for name in names if type(module.get_submodule(name)).__name__ in kinds]


def _linear(module: Any) -> str | list[str]:
    """Return all linear layers except the output embeddings.

    For a mixture of experts, return names. With "all-linear", PEFT would include the experts'
    stacked weights, which are not linear layers and whose inputs cannot have dropout.
    """
    if not any(parameter.dim() == 3 for parameter in module.parameters()):
        return "all-linear"
    words = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    heads = set(_heads(module))
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, torch.nn.Linear) and child is not words and name not in heads
    ]


def _heads(module: Any) -> Iterator[str]:
    """Yield the names of modules outside the base model, except the output embeddings.

    A classifier, for example, starts from random weights. A base model alone has none.
    """
    if getattr(module, "base_model", None) is module:
        return
    inner = getattr(module, "base_model_prefix", "")
    words = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for name, child in module.named_children():
        if name != inner and child is not words and any(True for _ in child.parameters()):
            yield name
