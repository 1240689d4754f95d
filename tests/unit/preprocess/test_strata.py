"""Classes are divided evenly among the sides of the split."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from steadytrain.components.preprocess.split import SIDES, TRAIN, sides_at, stratify
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace

from support.data import sentence, write_jsonl

SHARES = {SIDES.index("test"): 0.1, SIDES.index("validation"): 0.2}


def drawn(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


@pytest.mark.parametrize("seed", range(20))
def test_each_side_has_its_share_of_each_class(seed: int) -> None:
    sizes = [1, 2, 3, 4, 5, 10, 30, 100, 1000, 30_000]
    labels = np.repeat(np.arange(len(sizes), dtype=np.uint64) + 7, sizes)
    places = drawn(len(labels), seed)
    sides, rare = stratify(places, labels, SHARES)
    assert rare.tolist() == [7, 8]
    alone = sides_at(places, SHARES)
    for label, size in zip(np.unique(labels), sizes, strict=True):
        mine = labels == label
        counts = np.bincount(sides[mine], minlength=3)
        if size < 3:
            assert counts.tolist() == [0, 0, size]
            continue
        assert counts.min() > 0
        natural = np.bincount(alone[mine], minlength=3)
        within = True
        for side, share in SHARES.items():
            slack = max(1.0, 0.1 * share * size)
            assert abs(counts[side] - share * size) <= slack
            within &= natural[side] > 0 and abs(natural[side] - share * size) <= slack
        moved = (sides[mine] != alone[mine]).sum()
        if within:
            assert moved == 0, "where the hash divides a class well, no record moves"
        assert moved <= 2 * abs(counts - natural).sum()


def test_groups_stay_whole_and_every_class_is_trained() -> None:
    for seed in range(50):
        groups = drawn(40, seed)
        rng = np.random.default_rng(seed)
        places, labels = rng.choice(groups, 400), rng.integers(0, 12, 400).astype(np.uint64)
        # One class is in a single group, and another one in three.
        places[labels == 0] = groups[0]
        places[labels == 1] = rng.choice(groups[:3], (labels == 1).sum())
        sides, rare = stratify(places, labels, SHARES)
        assert len({*zip(places.tolist(), sides.tolist(), strict=True)}) == len({*places.tolist()})
        assert {*labels[sides == TRAIN].tolist()} == {*labels.tolist()}
        assert 0 in rare
        order = rng.permutation(400)
        assert (stratify(places[order], labels[order], SHARES)[0] == sides[order]).all()


def test_many_classes_in_few_groups_leave_no_side_empty() -> None:
    """Each group was the only one of its rarest class, so all were in training."""
    for seed in range(50):
        places = np.repeat(drawn(20, seed), 10)
        labels = np.random.default_rng(seed).permutation(np.arange(200, dtype=np.uint64) % 40)
        sides, _ = stratify(places, labels, SHARES)
        groups = np.bincount(sides[::10], minlength=3)
        assert 1 <= groups[SIDES.index("test")] <= 6
        assert 1 <= groups[SIDES.index("validation")] <= 7
        assert {*labels[sides == TRAIN].tolist()} == {*range(40)}


def test_rare_classes_are_trained_and_reported(tmp_path: Any, configure: Any) -> None:
    """They failed the run: with their few records held out, those were defective."""
    names = [*(f"rare {n % 30}" for n in range(60)), *(f"seen {n % 5}" for n in range(15))]
    rows = [{"text": sentence(n), "label": name} for n, name in enumerate(names)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    config = configure(path, task="sequence_classification", validation_share=0.05, test_share=0.05)
    record = run(config)
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    assert not card["defective"]
    assert card["sides"]["train"]["lacks"] == []
    rare = sorted({name for name in names if "rare" in name})
    for side in ("validation", "test"):
        assert card["sides"][side]["lacks"] == rare
        assert card["sides"][side]["labels"] == {f"seen {n}": 1 for n in range(5)}
    page = record.path("card.html").read_text(encoding="utf-8")
    assert "The test side lacks rare 0, rare 1, rare 10, " in page
    warned = [
        one.message for one in read_events(Workspace.of(config).events) if isinstance(one, Warned)
    ]
    assert warned == [
        "30 classes have too few records for 3 sides, so all of them are in training: "
        f"{', '.join(rare[:12])} and 18 more"
    ]


def test_only_rare_classes_are_an_error_that_says_so(tmp_path: Any, configure: Any) -> None:
    rows = [
        {"text": sentence(n), "label": n % 2, "patient": f"p{n % 4}", "id": n} for n in range(200)
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    columns = {"label": "label", "group": "patient"}
    config = configure(path, task="sequence_classification", columns=columns)
    with pytest.raises(DataError, match="2 classes have too few groups for 3 sides") as caught:
        run(config)
    assert "at least 3 groups" in caught.value.remedy
