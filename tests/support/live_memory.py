"""What a step of training holds at its peak: bytes of live tensors, counted on a CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
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
        """Counts the tensor's storage until it is freed; of a sharded one, this rank's part."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or tensor.device.type == "meta":
            return
        size = storage.nbytes()
        self.live[key] = (size, origin)
        self.bytes += size
        weakref.finalize(storage, self._forget, key)

    def __enter__(self) -> Self:
        """FSDP frees what it has gathered by resizing its storage, which is no operator."""
        self.resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.live:
                before, origin = self.live[storage._cdata]
                self.live[storage._cdata] = (size, origin)
                self.bytes += size - before
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def begin(self) -> None:
        """Forgets the peak so far."""
        self.peak = 0

    def _forget(self, key: int) -> None:
        size, _ = self.live.pop(key)
        self.bytes -= size
