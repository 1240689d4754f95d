"""Partners of mixup: the number of the global batch alone decides who they are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.techniques.mixup.mixing import PARTNER, SHARE
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.loop.batches import partners_of, take_share

from support.training import GPT2, class_rows


def test_each_row_is_a_partner_once_and_batches_differ():
    found = [partners_of(batch, 16, alpha=0.4, seed=3) for batch in range(50)]
    assert all(sorted(each.places) == list(range(16)) for each in found)
    assert len({tuple(each.places) for each in found}) == 50
    assert found == [partners_of(batch, 16, alpha=0.4, seed=3) for batch in range(50)]
    assert found[0] != partners_of(0, 16, alpha=0.4, seed=4)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 8.0])
def test_shares_are_from_the_beta_distribution(alpha):
    shares = np.array(partners_of(0, 20_000, alpha=alpha, seed=1).shares)
    assert shares.mean() == pytest.approx(0.5, abs=0.015)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


class Listing:
    """A task whose micro-batches are its rows."""

    def collate(self, rows):
        return {"rows": rows}

    def weight(self, batch):
        return len(batch["rows"])

    def cost(self, row):
        return len(row["input_ids"])

    def draw(self, row, position, *, training):
        assert training
        return {**row, "position": position}


def shares_of(*, world, micro, step=3, skipped=()):
    content = {
        "name": "tiny",
        "data": {"source": ["x"], "task": "sequence_classification"},
        "model": {"config": GPT2},
        "training": {"mixup": {"alpha": 0.4}, "global_batch_size": 8},
    }
    rows = class_rows(30)
    found = []
    for rank in range(world):
        parts = SimpleNamespace(
            config=from_mapping(content),
            order=RowOrder(len(rows), 42),
            skipped_batches=skipped,
            rank=rank,
            world_size=world,
            task=Listing(),
            train=rows,
            batch=BatchSettings(micro),
            sequences=None,
        )
        taken = take_share(parts, step)
        assert all(len(batch["rows"]) <= micro for batch in taken.batches)
        found += [row for batch in taken.batches for row in batch["rows"]]
    return found


def test_neither_ranks_nor_micro_batches_change_a_mixture():
    whole = shares_of(world=1, micro=8)
    assert len(whole) == 8
    assert whole == shares_of(world=1, micro=1) == shares_of(world=2, micro=2)
    assert whole == shares_of(world=3, micro=2)


def test_partner_is_the_row_at_its_own_place_of_the_same_batch():
    rows = shares_of(world=2, micro=2)
    own = {row["position"]: row["input_ids"] for row in rows}
    assert sorted(own) == list(range(24, 32))
    assert sorted(row[PARTNER]["position"] for row in rows) == sorted(own)
    assert all(own[row[PARTNER]["position"]] == row[PARTNER]["input_ids"] for row in rows)
    assert all(0 <= row[SHARE] <= 1 for row in rows)


def test_skipped_batch_takes_its_mixtures_with_it():
    assert shares_of(world=1, micro=8, step=2, skipped=(1,)) == shares_of(world=1, micro=8)
