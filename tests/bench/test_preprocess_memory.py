"""Memory use of preprocessing as the data grow: the figures on the benchmarks page.

Run with `pytest -m bench tests/bench/test_preprocess_memory.py -s`. Set the sizes in MB with
STEADYTRAIN_BENCH_MB="100,400".
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from steadytrain.components.shared.config import from_mapping

from support import preparing_ours
from support.measured import measured

SIZES = [int(size) for size in os.environ.get("STEADYTRAIN_BENCH_MB", "100,2000").split(",")]
RECORD_BYTES = 2000


def write_data(path: Path, megabytes: int) -> None:
    """Write records of random words from a large vocabulary."""
    generator = random.Random(0)
    vocabulary = [
        "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9)))
        for _ in range(50_000)
    ]
    with path.open("w") as handle:
        for _ in range(megabytes * 1_000_000 // RECORD_BYTES):
            text = " ".join(generator.choices(vocabulary, k=RECORD_BYTES // 7))
            handle.write(json.dumps({"text": text}) + "\n")


def measure(folder: Path, megabytes: int) -> tuple[int, float]:
    """Return the peak resident bytes and the seconds of one run."""
    folder.mkdir()
    write_data(folder / "x.jsonl", megabytes)
    config = from_mapping(
        {
            "name": "bench",
            "output": str(folder / "output"),
            "data": {"source": [str(folder / "x.jsonl")]},
            "model": {"config": {"model_type": "gpt2"}},
        }
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    found = measured([sys.executable, preparing_ours.__file__, str(folder / "config.yaml")])
    return found.peak, found.seconds


@pytest.mark.bench
@pytest.mark.timeout(7200)
def test_memory_stays_flat(tmp_path: Path) -> None:
    peaks = []
    for size in SIZES:
        peak, seconds = measure(tmp_path / str(size), size)
        print(f"\n{size} MB of input: {peak / 1e6:.0f} MB resident, {seconds:.0f} s")
        peaks.append(peak)
    # Allowed growth: 64 bytes per record, plus a sixth for allocator slack.
    records = (SIZES[-1] - SIZES[0]) * 1_000_000 // RECORD_BYTES
    assert peaks[-1] <= peaks[0] * 7 / 6 + 64 * records
