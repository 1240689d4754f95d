"""Memory of preprocessing as the data grow: the figures that the README may quote.

Run with `pytest -m bench tests/bench/test_preprocess_memory.py -s`; sizes in MB
can be given as STEADYTRAIN_BENCH_MB="100,400".
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.config import from_mapping

SIZES = [int(size) for size in os.environ.get("STEADYTRAIN_BENCH_MB", "100,2000").split(",")]
RECORD_BYTES = 2000
CODE = (
    "import sys\n"
    "from steadytrain.components.preprocess.step import run\n"
    "from steadytrain.components.shared.config import load\n"
    "if __name__ == '__main__':\n"
    "    run(load(sys.argv[1]))\n"
)


def write_data(path: Path, megabytes: int) -> None:
    """Records of random words from a large vocabulary."""
    generator = random.Random(0)
    vocabulary = [
        "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9)))
        for _ in range(50_000)
    ]
    with path.open("w") as handle:
        for _ in range(megabytes * 1_000_000 // RECORD_BYTES):
            text = " ".join(generator.choices(vocabulary, k=RECORD_BYTES // 7))
            handle.write(json.dumps({"text": text}) + "\n")


def resident(process: psutil.Process) -> int:
    """Bytes resident in a process and its children, pages of mapped files included."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def measure(folder: Path, megabytes: int) -> tuple[int, float]:
    """Peak of resident bytes and seconds of one run."""
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
    started, peak = time.monotonic(), 0
    # A file, since a worker starts by importing what its parent ran.
    (folder / "program.py").write_text(CODE)
    command = [sys.executable, str(folder / "program.py"), str(folder / "config.yaml")]
    with subprocess.Popen(command) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            peak = max(peak, resident(process))
            time.sleep(0.05)
    assert child.returncode == 0
    return peak, time.monotonic() - started


@pytest.mark.bench
@pytest.mark.timeout(7200)
def test_memory_stays_flat(tmp_path: Path) -> None:
    peaks = []
    for size in SIZES:
        peak, seconds = measure(tmp_path / str(size), size)
        print(f"\n{size} MB of input: {peak / 1e6:.0f} MB resident, {seconds:.0f} s")
        peaks.append(peak)
    # What may grow is 64 bytes a record, and a sixth for the allocator's slack.
    records = (SIZES[-1] - SIZES[0]) * 1_000_000 // RECORD_BYTES
    assert peaks[-1] <= peaks[0] * 7 / 6 + 64 * records
