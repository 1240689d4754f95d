from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.records import DataRecord

from support.data import texts, write_jsonl

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Return a small configuration.

    Keyword arguments go to the data section, except `model`, `run_name`, and `recovery`.
    """

    def make(
        source: Path | str | list[str],
        *,
        model: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        recovery: Mapping[str, Any] | None = None,
        **data: Any,
    ) -> RunConfig:
        addresses = source if isinstance(source, list) else [str(source)]
        shares = {"validation_share": 0.2, "test_share": 0.2, "sequence_length": 32}
        return from_mapping(
            {
                "name": "small",
                "run": run_name,
                "output": str(tmp_path / "output"),
                "data": {"source": addresses, **shares, **data},
                "model": model or {"config": {"model_type": "gpt2"}, "vocab_size": 400},
                "recovery": recovery or {},
            }
        )

    return make


@pytest.fixture
def prepared(tmp_path: Path, configure: Configure) -> DataRecord:
    """The prepared data of a hundred texts."""
    return run(configure(write_jsonl(tmp_path / "texts.jsonl", texts(100))))
