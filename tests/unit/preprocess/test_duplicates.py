from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from steadytrain.components.preprocess.boilerplate import (
    PERMUTATIONS,
    OwnSignatures,
    band_rows,
    bands,
    shingles,
    sign,
    sign_unshared,
)
from steadytrain.components.preprocess.duplicates import (
    REASONS,
    Findings,
    band_name,
    find_duplicates,
)
from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.split import SIDES, content_id
from steadytrain.components.preprocess.spool import SCHEMA, Batch, Spool

from support.data import sentence

THRESHOLD = 0.85
ROWS = band_rows(THRESHOLD)
TEST, VALIDATION, TRAIN = map(SIDES.index, ("test", "validation", "train"))
Spooled = tuple[str, int, int]


def spool_of(folder: Path, records: list[Spooled]) -> Spool:
    """Return a spool of (content, side, label) records, in that order."""
    spool = Spool(folder, 0)
    contents = [content for content, _, _ in records]
    hashes = bands(signed(contents), ROWS)
    labels = np.array([label for _, _, label in records], dtype=np.uint64)
    identities = b"".join(content_id(content) for content, _, _ in records)
    arrays: dict[str, NDArray[np.generic]] = {
        "ids": np.frombuffer(identities, dtype=np.uint8),
        "sides": np.array([side for _, side, _ in records], dtype=np.uint8),
        "labels": labels,
        "variants": labels,
        **{band_name(band): hashes[:, band] for band in range(hashes.shape[1])},
    }
    rows = [{"number": number, "content": content} for number, content in enumerate(contents)]
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    spool.add(Batch([(0, 0, len(records))], arrays, len(records), batch))
    spool.close()
    return spool


def signed(contents: list[str]) -> NDArray[np.uint32]:
    return sign(*shingles(contents))


def find(
    spool: Spool,
    *,
    conflicts: bool = False,
    threshold: float | None = THRESHOLD,
    sign_again: Callable[[NDArray[np.uint32]], OwnSignatures] | None = None,
) -> Findings:
    def whole(numbers: NDArray[np.uint32]) -> OwnSignatures:
        nothing = np.zeros(0, np.uint64)
        return sign_unshared(
            spool, numbers, shared=nothing, compared=None, rows=ROWS, workers=Workers(1)
        )

    return find_duplicates(
        spool,
        np.fromfile(spool.array_path("sides"), np.uint8),
        threshold=threshold,
        bands=PERMUTATIONS // ROWS,
        conflicts=conflicts,
        sign_again=sign_again or whole,
        progress=lambda done, total: None,
    )


def verdicts(folder: Path, records: list[Spooled], **options: bool) -> dict[Spooled, str]:
    codes = find(spool_of(folder, records), **options).codes
    return {record: REASONS[code] for record, code in zip(records, codes, strict=True)}


def near(seed: int, change: str) -> str:
    """Return a long text that differs from others in one word."""
    return f"{sentence(seed, words=300)} {change}"


def test_distinct_records_stay(tmp_path: Path) -> None:
    records = [(sentence(seed), TRAIN, 0) for seed in range(300)]
    assert set(verdicts(tmp_path / "s", records).values()) == {""}


def test_one_of_equal_records_stays(tmp_path: Path) -> None:
    spool = spool_of(tmp_path / "s", [("a b c", TRAIN, 0)] * 3 + [("d e f", TRAIN, 0)])
    findings = find(spool)
    assert sorted(REASONS[code] for code in findings.codes[:3]) == ["", *["exact_duplicate"] * 2]
    kept = int(np.flatnonzero(findings.codes[:3] == 0)[0])
    assert {int(findings.partners[one]) for one in range(3) if one != kept} == {kept}


def test_training_copy_of_a_held_out_record_is_a_leak(tmp_path: Path) -> None:
    records = [
        ("one and the same text of a few words", TRAIN, 1),
        ("one and the same text of a few words", TEST, 2),
        (near(1, "alpha"), VALIDATION, 0),
        (near(1, "beta"), TRAIN, 0),
    ]
    found = verdicts(tmp_path / "s", records)
    assert [found[record] for record in records] == ["leakage", "", "", "leakage"]


def test_near_duplicates_are_independent_of_order(tmp_path: Path) -> None:
    records = [(near(seed, word), TRAIN, 0) for seed in range(4) for word in ("a", "b", "c")]
    records += [(near(0, "held"), TEST, 0), (near(3, "held"), VALIDATION, 0)]
    orders = [records, records[::-1], records[5:] + records[:5]]
    found = [verdicts(tmp_path / f"s{number}", order) for number, order in enumerate(orders)]
    assert found[0] == found[1] == found[2]
    by_seed = [sorted(found[0][near(seed, word), TRAIN, 0] for word in "abc") for seed in range(4)]
    assert by_seed[0] == by_seed[3] == ["leakage"] * 3
    assert by_seed[1] == by_seed[2] == ["", "near_duplicate", "near_duplicate"]


def test_remaining_records_are_not_near_duplicates(tmp_path: Path) -> None:
    words = sentence(5, words=120).split()
    # A chain: each text is close to its neighbors and far from those at the other end.
    chain = [" ".join(words[start : start + 100]) for start in range(20)]
    records = [(text, (TRAIN, TEST)[number % 2], 0) for number, text in enumerate(chain)]
    found = verdicts(tmp_path / "s", records)
    kept = [record for record in records if not found[record]]
    signatures = signed([text for text, _, _ in kept])
    hashes = bands(signatures, ROWS)
    assert 1 <= len(kept) < len(records)
    for one, two in itertools.combinations(range(len(kept)), 2):
        similar = np.mean(signatures[one] == signatures[two]) >= THRESHOLD
        assert not (similar and (hashes[one] == hashes[two]).any())


def test_near_duplicates_have_the_same_label(tmp_path: Path) -> None:
    records = [(near(1, word), TRAIN, label) for word, label in (("a", 1), ("b", 2), ("c", 1))]
    assert sorted(verdicts(tmp_path / "s", records).values()) == ["", "", "near_duplicate"]
    held_out = [(near(2, "a"), TEST, 1), (near(2, "b"), TRAIN, 2), (near(2, "c"), TRAIN, 1)]
    assert list(verdicts(tmp_path / "t", held_out).values()) == ["", "", "leakage"]


def test_near_duplicates_need_a_threshold(tmp_path: Path) -> None:
    records = [(near(1, "alpha"), TRAIN, 0), (near(1, "beta"), TRAIN, 0)]
    assert find(spool_of(tmp_path / "s", records), threshold=None).codes.tolist() == [0, 0]


def test_equal_content_with_conflicting_labels_is_set_aside(tmp_path: Path) -> None:
    records = [("same words", TRAIN, label) for label in (1, 2, 3)] + [("other words", TRAIN, 1)]
    found = verdicts(tmp_path / "s", records, conflicts=True)
    assert list(found.values()) == [*["conflicting_label"] * 3, ""]


def test_estimate_is_near_the_true_similarity() -> None:
    words = [f"w{number}" for number in range(2000)]
    one, two = " ".join(words[:1500]), " ".join(words[150:1650])
    sets = [{tuple(text.split()[i : i + 5]) for i in range(1496)} for text in (one, two)]
    true = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    signatures = signed([one, two])
    assert np.mean(signatures[0] == signatures[1]) == pytest.approx(true, abs=0.12)


def test_texts_without_spaces_are_compared_by_character() -> None:
    one = "深い森の奥に小さな家があり、老いた時計職人が静かに暮らしていた。"
    signatures = signed(
        [one * 3, one * 3 + "終", "全く別の文章で、似たところは何もないはずだ。" * 3]
    )
    assert np.mean(signatures[0] == signatures[1]) > 0.7
    assert np.mean(signatures[0] == signatures[2]) < 0.3


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.85, 0.95, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold: float) -> None:
    rows = band_rows(threshold)
    assert 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.99


def peak_bytes(folder: Path, count: int) -> int:
    """Return the peak memory of finding duplicates among random records, each with a copy."""
    generator = np.random.default_rng(count)
    signatures = generator.integers(0, 2**32, (count, PERMUTATIONS), dtype=np.uint32)
    signatures[1::2] = signatures[::2]
    hashes = bands(signatures, ROWS)
    arrays: dict[str, NDArray[np.generic]] = {
        "ids": generator.integers(0, 256, (count, 16), dtype=np.uint8),
        "sides": generator.integers(0, 3, count, dtype=np.uint8),
        "labels": np.zeros(count, dtype=np.uint64),
        "variants": generator.integers(0, 2**63, count, dtype=np.uint64),
        **{band_name(band): hashes[:, band] for band in range(hashes.shape[1])},
    }
    spool = Spool(folder, 0)
    spool.add(Batch([], arrays, count))
    spool.close()
    signatures.tofile(folder / "own-signatures.bin")
    generator.integers(0, 2**63, hashes.T.shape, dtype=np.uint64).tofile(folder / "own-bands.bin")
    del signatures, hashes, arrays

    def again(numbers: NDArray[np.uint32]) -> OwnSignatures:
        assert len(numbers) == count
        return OwnSignatures(numbers, 1, folder / "own-signatures.bin", folder / "own-bands.bin")

    tracemalloc.start()
    try:
        find(spool, conflicts=True, sign_again=again)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_below_64_bytes_per_record(tmp_path: Path) -> None:
    small, large = peak_bytes(tmp_path / "small", 20_000), peak_bytes(tmp_path / "large", 60_000)
    assert (large - small) / 40_000 <= 64
