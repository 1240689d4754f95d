"""Choose the parts of a base model to load into host memory instead of the GPU.

A 4-bit base model is quantized on the GPU while it is loaded. Parts that stay on the host, or that
are quantized later, would need memory there that a small GPU does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from steadytrain.components.shared.config import AdapterConfig

Device = int | str
Places = dict[str, Device]
"""Devices of modules and parameters by name, as Transformers expects them. "" is the full model."""


def places(
    auto: Any, folder: Path, adapter: AdapterConfig, device: Device, *, run_code: bool
) -> Places:
    """Return the device to load each part of the model to.

    Args:
        auto: Transformers' auto class for the kind of model.
        device: device of everything that does not stay on the host.
        run_code: whether Python code next to the model may run.
    """
    host, quantized = adapter.frozen_embeddings == "host", adapter.frozen_head != "as_loaded"
    if not (host or quantized):
        return {"": device}
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=run_code)
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=run_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kept = [embedding] if host else []
    if quantized and head is not None and (host or head.weight is not embedding.weight):
        kept.append(head)
    return _places(model, "", kept, device)


def _places(module: Any, name: str, kept: list[Any], device: Device) -> Places:
    """Return the fewest names that separate the kept parts from the rest.

    accelerate places everything under a name.
    """
    if any(module is part for part in kept):
        return {name: "cpu"}
    if not any(inner is part for inner in module.modules() for part in kept):
        return {name: device}
    before = f"{name}." if name else ""
    found: Places = {f"{before}{own}": device for own, _ in module.named_parameters(recurse=False)}
    for inner, child in module.named_children():
        found |= _places(child, f"{before}{inner}", kept, device)
    return found


def leave_on_the_host(model: Any, device: Device) -> None:
    """Stop moving the parts on the host to the GPU in each forward pass.

    Args:
        device: device of all other parts.
    """
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    # accelerate and Transformers use this to recognize models that are spread over devices.
    model.hf_device_map = {"": device}
