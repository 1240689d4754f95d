"""What a step of training holds at its peak: bytes of live tensors, counted on a CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Counts the storages that are alive, by what made them.

    Only what an operator returns is seen: the scratch space within a kernel is not.

    peak: most bytes at a time. at_peak: bytes then, by the operator that made them, its type
        and its shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, str]] = {}
        self.bytes = self.peak = 0
        self.at_peak: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, f"{func} {str(tensor.dtype)[6:]} {tuple(tensor.shape)}")
        if self.bytes > self.peak:
            self.peak = self.bytes
            self.at_peak = Counter()
            for size, origin in self.live.values():
                self.at_peak[origin] += size
        return result

    def see(self, tensor: torch.Tensor, origin: str) -> None:
        """Counts the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or tensor.device.type == "meta":
            return
        size = storage.nbytes()
        self.live[key] = (size, origin)
        self.bytes += size
        weakref.finalize(storage, self._forget, key)

    def begin(self) -> None:
        """Forgets the peak so far."""
        self.peak = 0

    def _forget(self, key: int) -> None:
        size, _ = self.live.pop(key)
        self.bytes -= size
