"""Bytes of live tensors, counted while operators run: real tensors or fakes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Naming = Callable[[Any, torch.Tensor], str]
"""Returns the name that an operator's result is counted under."""


def by_operator(operator: Any, tensor: torch.Tensor) -> str:
    """Return the operator itself, with its result's type and shape."""
    return f"{operator} {str(tensor.dtype)[6:]} {tuple(tensor.shape)}"


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages by name.

    It only sees what an operator returns, not the scratch space within a kernel.

    now: the moment that it is.
    peaks: for each moment, bytes by name when most were alive.
    """

    def __init__(self, naming: Naming = by_operator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.naming = naming
        self.now: Any = ""
        self.live: dict[int, tuple[int, str]] = {}
        self.bytes, self.held = 0, Counter[str]()
        self.begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; hiding each operator from the compiler takes a while."""
        return False

    def begin(self) -> None:
        """Forget the peaks."""
        self.peaks: dict[Any, Mapping[str, int]] = {}
        self._most: dict[Any, int] = {}

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return max(self._most.values(), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, self.naming(func, tensor))
        if self.bytes > self._most.get(self.now, 0):
            self._most[self.now], self.peaks[self.now] = self.bytes, dict(self.held)
        return result

    def see(self, tensor: torch.Tensor, name: str) -> None:
        """Count the tensor's storage until it is freed; for a sharded tensor, this rank's part."""
        storage = _storage(tensor)
        key = storage._cdata
        if key in self.live or tensor.device.type == "meta":
            return
        self._add(key, storage.nbytes(), name)
        weakref.finalize(storage, self._forget, key).atexit = False

    def rename(self, tensor: torch.Tensor, name: str) -> None:
        """Count a known tensor under another name."""
        key = _storage(tensor)._cdata
        if key in self.live:
            self._add(key, self._forget(key), name)

    def __enter__(self) -> Self:
        """Also count resizing: FSDP frees gathered weights that way, and it is not an operator."""
        self.resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.live:
                _, name = self.live[storage._cdata]
                self._forget(storage._cdata)
                self._add(storage._cdata, size, name)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _add(self, key: int, size: int, name: str) -> None:
        self.live[key] = (size, name)
        self.bytes += size
        self.held[name] += size

    def _forget(self, key: int) -> int:
        size, name = self.live.pop(key)
        self.bytes -= size
        self.held[name] -= size
        return size


def first_tensor(given: Any) -> torch.Tensor:
    """Return the first floating-point tensor of a layer's arguments or results."""
    tensors = (item for item in tree_iter(given) if isinstance(item, torch.Tensor))
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
