"""`doctor` reports a global batch that differs from its base while nothing scales the rate."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
from steadytrain.pipelines.doctor import examine


@pytest.mark.parametrize(
    ("scaling", "base", "found"),
    [
        ("none", 8, (False, "x 1 by training.lr_scaling none: 32 sequences per step, base 8")),
        ("sqrt", 8, (True, "x 2 by training.lr_scaling sqrt")),
        ("none", 32, (True, "x 1 by training.lr_scaling none")),
        ("none", "null", None),
    ],
)
def test_batch_that_differs_from_its_base(tmp_path, monkeypatch, scaling, base, found):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fields = [
        f"training.lr_scaling={scaling}",
        f"training.base_global_batch_size={base}",
        "training.global_batch_size=32",
    ]
    lines = examine(tmp_path, load("causal-lm", fields))
    rate = [item for item in lines if item.topic == "learning rate"]
    assert len(rate) == (found is not None)
    if found is not None:
        assert rate[0].good == found[0]
        assert rate[0].text.startswith(found[1])
