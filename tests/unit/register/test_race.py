"""Two processes promote their models at the same moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.shared.records import GateRecord, RegistrationRecord
from steadytrain.components.shared.registry import Registry
from steadytrain.components.shared.workspace import Workspace

TESTS = Path(__file__).resolve().parents[2]
PROMOTE = """
import sys
from steadytrain.components.register.step import promote
from support.evaluating import make_config
from pathlib import Path
config = make_config(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
promote(config)
"""


def start(config):
    return subprocess.Popen(
        [sys.executable, "-c", PROMOTE, config.output, config.run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.long
@pytest.mark.slow
def test_better_of_two_concurrent_promotions_becomes_champion(trained):
    """Neither gate saw a champion. The second promotion must be compared with the first."""
    configs = [trained("worse", 0.65), trained("better", 0.9)]
    for config in configs:
        _, gate = evaluate(config)
        assert gate.promoted
        assert gate.champion_version is None
        register(config)
    processes = [start(config) for config in configs]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=600)
        assert process.returncode == 0
    worse, better = (Workspace.of(config) for config in configs)
    champion = Registry(configs[0], worse).by_alias("champion")
    assert champion.number == "2"
    assert RegistrationRecord.load(better.record("promote")).champion
    # One run found the other's champion, so its gate decided again.
    met = [GateRecord.load(place.record("gate")).champion_version for place in (worse, better)]
    assert met in (["2", None], [None, "1"])
    assert RegistrationRecord.load(worse.record("promote")).champion is (met[0] is None)


@pytest.mark.slow
def test_loser_of_a_race_is_not_tagged_promoted(trained):
    """Both gates saw no champion. The second promotion loses to the first."""
    better, worse = trained("better", 0.9), trained("worse", 0.65)
    for config in (better, worse):
        evaluate(config)
        register(config)

    def tags():
        registry = Registry(better, Workspace.of(better))
        return [registry.numbered(number).tags["steadytrain.gate"] for number in ("1", "2")]

    assert tags() == ["passed", "passed"]
    assert promote(better).champion
    assert not promote(worse).champion
    assert tags() == ["promoted", "rejected"]
