"""The weights that a model was loaded from: their precision, those that do not match, and QLoRA's.

A frozen matrix in 4 or 8 bits is unpacked a few rows at a time.

4 bits follow QLoRA: NF4, with one scale per 64 values (Dettmers et al. 2023), by the kernels of
bitsandbytes. 8 bits are integers from -127 to 127 with the same kind of scales. For normally
distributed weights, the root mean square error is 9.2 % of their size in 4 bits and 0.6 % in 8
bits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch

from steadytrain.components.shared.chunks import QUANTIZED_BLOCK, product_rows
from steadytrain.components.shared.errors import BadInput

# Check that a base model's files match the model: no weight is missing and none is left over.
#
# Transformers initializes missing weights at random and drops extra ones, both without an error.

_NO_WEIGHTS = (".masked_bias", ".inv_freq", ".position_ids")
"""Buffers that older versions of Transformers also saved."""


def check_complete(
    model: Any, report: Mapping[str, Any], folder: Path, *, new_head: bool, field: str
) -> None:
    """Check the loading report from Transformers.

    Args:
        report: the loading info of `from_pretrained`.
        new_head: the head is newly initialized, so only the weights below it must match.
        field: names the folder in errors.

    Raises:
        BadInput: weights are missing, have a different shape, or are left over.
    """
    missing = [name for name in report["missing_keys"] if not new_head or _is_inner(model, name)]
    source = f"{field}: {folder}"
    _refuse(source, "lacks {} of the model", missing, "give the folder of the complete model")
    remedy = "restore the config.json that belongs to the weights"
    shapes = [name for name, *_ in report["mismatched_keys"] if _is_inner(model, name)]
    _refuse(source, "contains {} whose shape differs from its config.json", shapes, remedy)
    buffers = {name for name, _ in model.named_buffers()}
    left = [
        name
        for name in report["unexpected_keys"]
        if _is_inner(model, name)
        and not name.endswith(_NO_WEIGHTS)
        and not buffers & {name, f"{model.base_model_prefix}.{name}"}
    ]
    _refuse(source, "contains {} that its config.json does not define", left, remedy)


def _refuse(source: str, what: str, names: Iterable[str], remedy: str) -> None:
    ordered = sorted(names)
    if ordered:
        count = f"{len(ordered)} weight{'s' if len(ordered) > 1 else ''}"
        raise BadInput(f"{source} {what.format(count)}, such as {ordered[0]}", remedy=remedy)


def _is_inner(model: Any, name: str) -> bool:
    """Return whether a weight belongs to the base model, whose prefix a file may omit.

    The pooler does not: it is initialized for the head.
    """
    if "pooler" in name or in_inner_head(model, name):
        return False
    first = name.partition(".")[0]
    return first == model.base_model_prefix or first in {
        child for child, _ in model.base_model.named_children()
    }


def inner_heads(model: Any) -> tuple[str, ...]:
    """Return the heads that are inside of the base model, as those of timm's models are."""
    inner = getattr(model, "timm_model", None)
    names = inner.pretrained_cfg.get("classifier") if inner is not None else ()
    listed = (names,) if isinstance(names, str) else tuple(names or ())
    return tuple(f"{model.base_model_prefix}.{name}" for name in listed)


def in_inner_head(model: Any, name: str) -> bool:
    """Return whether a weight or module belongs to one of these heads."""
    return any(f"{name}.".startswith(f"{head}.") for head in inner_heads(model))


_NEW, _RESIZED, _DTYPE = "_steadytrain_new", "_steadytrain_resized", "_steadytrain_dtype"
_STORED: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of precisions in the header of a safetensors file."""


def note_new_weights(model: Any, absent: Iterable[str], resized: Iterable[str]) -> None:
    """Remember which weights are not from a file, so that they start from random values.

    Args:
        absent: weights that no file has.
        resized: weights that have another shape in the files.
    """
    setattr(model, _RESIZED, tuple(resized))
    setattr(model, _NEW, (*absent, *resized_weights(model)))


def new_weights(model: Any) -> Sequence[str]:
    """Return the weights that are not from a file."""
    result: Sequence[str] = getattr(model, _NEW, ())
    return result


def resized_weights(model: Any) -> Sequence[str]:
    """Return those of them that have another shape in the files, such as another number of rows."""
    result: Sequence[str] = getattr(model, _RESIZED, ())
    return result


def new_modules(model: Any) -> list[str]:
    """Return the modules whose weights are not from a file, such as a new pooler."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in new_weights(model)))


def note_dtype(model: Any, folder: Path) -> None:
    """Remember the precision that most of the values in a folder's files have."""
    setattr(model, _DTYPE, _stored_dtype(folder))


def dtype_of_files(model: Any) -> torch.dtype:
    """Return the precision of the files that a model is from; float32 if it is from none."""
    result: torch.dtype = getattr(model, _DTYPE, torch.float32)
    return result


def _stored_dtype(folder: Path) -> torch.dtype:
    sizes = Counter[torch.dtype]()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in _STORED:
                start, end = tensor["data_offsets"]
                sizes[_STORED[tensor["dtype"]]] += end - start
    if sizes:
        return sizes.most_common(1)[0][0]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = f"torch.{config.get('dtype') or config.get('torch_dtype')}"
    return next((dtype for dtype in _STORED.values() if str(dtype) == named), torch.float32)


Bits = Literal["4bit", "8bit"]
_LARGEST: Final = 127


class QuantizedMatrix(torch.nn.Module):
    """A quantized matrix.

    A matrix of a head's size is never fully unpacked. Products go over blocks of rows.

    Args:
        weight: (rows, width). The width is a multiple of QUANTIZED_BLOCK.
        device: device of the quantized matrix. `weight` may be on another one and moves block by
            block.

    shape: (rows, width). dtype: that of `weight`.
    """

    def __init__(self, weight: torch.Tensor, bits: Bits, device: torch.device) -> None:
        super().__init__()
        rows, width = weight.shape
        self.shape, self.dtype, self.bits = weight.shape, weight.dtype, bits
        packed, kind = (width // 2, torch.uint8) if bits == "4bit" else (width, torch.int8)
        codes = torch.empty(rows, packed, dtype=kind, device=device)
        scales = torch.empty(rows, width // QUANTIZED_BLOCK, dtype=torch.float32, device=device)
        pack = _pack_4_bits if bits == "4bit" else _pack_8_bits
        for block in self._blocks():
            values = weight[block].detach().to(device)
            result, sizes = pack(values)
            codes[block], scales[block] = result.view_as(codes[block]), sizes.view_as(scales[block])
        # Use parameters, because DDP broadcasts buffers in each forward pass.
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)

    def _blocks(self) -> Iterator[slice]:
        size = product_rows(self.shape[1])
        return (slice(start, start + size) for start in range(0, self.shape[0], size))

    def unpacked(self, block: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return some of the rows, (n, width)."""
        unpack = _unpack_4_bits if self.bits == "4bit" else _unpack_8_bits
        return unpack(self.codes[block], self.scales[block], dtype)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return `inputs @ matrix.T`.

        Args:
            inputs: (n, width).

        Returns:
            (n, rows), in the dtype of `inputs`.
        """
        result = inputs.new_empty(inputs.shape[0], self.shape[0])
        for block in self._blocks():
            # Don't bind the unpacked rows to a name, or they stay alive until the next ones exist.
            torch.mm(inputs, self.unpacked(block, inputs.dtype).T, out=result[:, block])
        return result

    def transposed_product(self, errors: torch.Tensor) -> torch.Tensor:
        """Return `errors @ matrix`, accumulated in float32.

        Args:
            errors: (n, rows).

        Returns:
            (n, width), float32.
        """
        total = errors.new_zeros(errors.shape[0], self.shape[1], dtype=torch.float32)
        for block in self._blocks():
            total += errors[:, block] @ self.unpacked(block, errors.dtype)
        return total


def _pack_4_bits(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(block, blocksize=QUANTIZED_BLOCK, quant_type="nf4")
    return codes, state.absmax


def _unpack_4_bits(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from bitsandbytes import functional

    state = functional.QuantState(
        absmax=scales.reshape(-1),
        shape=torch.Size((codes.shape[0], 2 * codes.shape[1])),
        blocksize=QUANTIZED_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    result: torch.Tensor = functional.dequantize_4bit(codes.reshape(-1, 1), state)
    return result


def _pack_8_bits(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = block.float().view(block.shape[0], -1, QUANTIZED_BLOCK)
    # Any scale restores a block of zeros. The minimum avoids a division by zero.
    scales = (values.abs().amax(2) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values / scales.unsqueeze(2)).round_().to(torch.int8), scales


def _unpack_8_bits(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    blocks = (codes.shape[0], -1, QUANTIZED_BLOCK)
    torch.mul(codes.view(blocks), scales.unsqueeze(2), out=result.view(blocks))
    return result


def product_type(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """Return autocast's dtype if autocast is on for the device, otherwise `otherwise`."""
    # The meta device has no autocast.
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if half else otherwise
