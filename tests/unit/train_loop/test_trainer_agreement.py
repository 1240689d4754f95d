"""The loop learns what the Transformers Trainer learns, step by step."""

from __future__ import annotations

import json

import pytest

from support import agreement
from support.forked import on_ranks

CASES = [
    (ranks, name)
    for ranks in (1, 2)
    for name, (_, smoothing) in agreement.SETTINGS.items()
    if ranks == 1 or not smoothing
]


@pytest.fixture(scope="module")
def losses(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    if request.param == 1:
        agreement.main(folder)
    else:
        on_ranks(request.param, agreement.main, folder)
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize(("losses", "setting"), CASES, indirect=["losses"])
def test_losses_agree_with_trainer(losses, setting):
    ours, theirs = losses[setting]

    assert len(ours) == agreement.STEPS
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < 0.9 * ours[0]
