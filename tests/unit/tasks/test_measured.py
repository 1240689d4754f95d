"""What a classifier of texts costs its users."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config import load
from steadytrain.components.tasks import sequence_classification
from steadytrain.components.tasks.sequence_classification import ClassifierPackager


@pytest.mark.parametrize(("adapted", "size"), [(False, 2.0), (True, 2.0 + 1_001_000 * 2 / 1e6)])
def test_adapters_are_as_large_as_the_model_that_they_are_registered_with(
    tmp_path, monkeypatch, adapted, size
):
    files = Artifact(latency_p50_ms=1.0, latency_p99_ms=1.0, memory_mb=1.0, size_mb=2.0)
    monkeypatch.setattr(sequence_classification, "timed", lambda *_, **__: files)
    config = load("sequence-classification", ["model.export_dtype=bfloat16"])
    packager = ClassifierPackager(config, None)
    model = torch.nn.Linear(1000, 1000)
    monkeypatch.setattr(packager, "load_exported", lambda _: {"model": model})
    if adapted:
        (tmp_path / "adapter_config.json").touch()
    assert packager.measured(tmp_path, pa.table({"id": ["a"]})).size_mb == pytest.approx(size)
