"""The loop learns what the Transformers Trainer learns, step by step."""

from __future__ import annotations

import json

import pytest

from support import agreement
from support.forked import on_ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_losses_agree_with_trainer(ranks, tmp_path):
    if ranks == 1:
        agreement.main(tmp_path)
    else:
        on_ranks(ranks, agreement.main, tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())

    assert list(losses) == agreement.settings(ranks)
    for name, (ours, theirs) in losses.items():
        assert len(ours) == agreement.STEPS
        assert ours == pytest.approx(theirs, rel=1e-5), name
        assert ours[-1] < 0.9 * ours[0], name
