"""The dtype of matrix products."""

from __future__ import annotations

import torch


def product_type(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """Return autocast's dtype if autocast is on for the device, otherwise `otherwise`."""
    # The meta device has no autocast.
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if half else otherwise
