"""The loop learns what Transformers' Trainer learns, step by step."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support import agreement
from support.training import TEST_ENVIRONMENT, rank_command


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def losses(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    if request.param == 1:
        agreement.main(folder)
    else:
        under_torchrun(folder, request.param)
    return json.loads((folder / "losses.json").read_text())


def under_torchrun(folder, ranks):
    done = subprocess.run(
        rank_command(ranks, agreement.__file__, str(folder)),
        env={**os.environ, **TEST_ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("accumulation", agreement.ACCUMULATIONS)
def test_losses_agree_with_trainer(losses, accumulation):
    ours, theirs = losses[str(accumulation)]

    assert len(ours) == agreement.STEPS
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < 0.9 * ours[0]
