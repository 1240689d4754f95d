"""Any damage to a file of a run: no command ends in a traceback, and no other run is affected.

All combinations of file, damage, and command would be thousands of commands. By default the
tests run a random sample of them. STEADYTRAIN_DAMAGE_SEED sets its seed. `pytest -m soak` runs
them all.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from steadytrain.components.report import step as report_step
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events.types import DecisionMade, SupervisorStarted
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.pipelines import local

from support.odd import COMMAND

SAMPLE = 40
SEED = int(os.environ.get("STEADYTRAIN_DAMAGE_SEED", "12"))


def empty(path):
    path.write_bytes(b"")


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes() or b"\0")
    place = random.Random(f"{SEED} {path.name}").randrange(len(content) * 8)
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def swap_types(path):
    """Write valid JSON in which every field has the wrong type."""
    path.write_text('{"event": ["step_started"], "time": "now", "schema_version": []}\n')


def binary(path):
    path.write_bytes(random.Random(SEED).randbytes(4096) + b"\n")


def nest(path):
    path.write_text("[" * 100_000 + "\n")


def make_folder(path):
    path.unlink()
    path.mkdir()


def link_nowhere(path):
    path.unlink()
    path.symlink_to("nowhere/at/all")


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def break_reads(path):
    """Make reads of the file fail with EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


HARMS = [
    empty,
    truncate,
    flip,
    swap_types,
    binary,
    nest,
    make_folder,
    link_nowhere,
    link_to_itself,
    make_pipe,
    break_reads,
    Path.unlink,
]
READING = (["list"], ["explain", "hurt"], ["stop", "hurt"], ["gc", "--dry-run"])
WRITING = (["report", "hurt"], ["resume", "hurt"], ["gc"])


@pytest.fixture
def runs(make_run, age, monkeypatch):
    """A run that has every kind of file, and another run."""
    hurt, other = (
        make_run(name, saved=(10, 20, 30), best=20, recovery={"lease_seconds": 1})
        for name in ("hurt", "other")
    )
    for run in (hurt, other):
        run.preprocess(card={})
        run.emit("supervisor", SupervisorStarted, generation=0, pid=1, host="here")
        run.attempt(1, last=20, max_steps=40, outcome="failed", failure_class="divergence")
        run.emit(
            "supervisor",
            DecisionMade,
            attempt=1,
            failure_class="divergence",
            action="retry_changed",
            reason="so",
            skipped_batch=7,
        )
        run.attempt(2, first=20, last=40, max_steps=40)
        run.trained(steps=40)
        run.decided(False, "no better", metric="loss", greater_is_better=False, candidate=1.0)
        run.fail("register", "TrackingError", "no connection")
        with hold(LocalStorage(run.workspace.lease), run_id=run.workspace.run_id, seconds=1):
            pass
        run.workspace.report.write_text("<html>")
        run.workspace.notified.write_text("sent")
        run.workspace.tracking.mkdir()
        (run.workspace.tracking / "run").write_text("0" * 32)
        age(run)
    # MLflow takes seconds per command and has its own tests. So does what a run starts.
    monkeypatch.setattr(report_step, "finish_run", lambda *_, **__: True)
    stopped = local.LocalRun(hurt.workspace, succeeded=False, stopped=True, failure=None)
    monkeypatch.setattr(local, "run_locally", lambda *_, **__: stopped)
    return hurt, other


def files(run):
    folder = run.workspace.folder
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def content(run):
    return {name: (run.workspace.folder / name).read_bytes() for name in files(run)}


def told(command, run):
    """Return what a command prints. Fail unless it succeeds or ends with one of our own errors."""
    out, ended = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            COMMAND([*command, "--output", str(run.workspace.output)], prog_name="steadytrain")
    except (SystemExit, Exception) as error:
        ended = error
    if ended is None or isinstance(ended, SystemExit):
        return out.getvalue()
    if isinstance(ended, SteadytrainError):
        assert ended.message
        assert ended.remedy, f"{command}: {ended.message}"
        return str(ended)
    raise AssertionError(
        f"{' '.join(command)} ended in a traceback:\n{''.join(traceback.format_exception(ended))}"
    )


@contextlib.contextmanager
def kept(run):
    """Restore the run's folder afterwards."""
    folder, copy = run.workspace.folder, run.workspace.output.parent / "copy"
    shutil.copytree(folder, copy)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        copy.rename(folder)


def go_through(hurt, other, cases, commands=(*READING, *WRITING)):
    unharmed, problems = content(other), []
    for name, harm in cases:
        with kept(hurt):
            harm(hurt.workspace.folder / name)
            for command in commands:
                if command == ["gc"]:
                    continue
                try:
                    said = told(command, hurt)
                    assert command != ["list"] or "other" in said, said
                    assert content(other) == unharmed
                except AssertionError as error:
                    problems.append(f"{name} {harm.__name__}: {error}")
    assert not problems, f"{len(problems)} problems, such as\n" + "\n".join(problems[:5])


def cases(run):
    return [(name, harm) for name in files(run) for harm in HARMS]


@pytest.mark.long
def test_sampled_damage_is_survived(runs):
    hurt, other = runs
    go_through(hurt, other, random.Random(SEED).sample(cases(hurt), SAMPLE))


@pytest.mark.soak
def test_every_damage_is_survived(runs):
    hurt, other = runs
    go_through(hurt, other, cases(hurt))


@pytest.mark.parametrize("folder", ["events", "lease", "records", "checkpoints"])
@pytest.mark.parametrize("harm", [make_folder, make_pipe, link_nowhere, empty, Path.unlink])
def test_other_folders_are_survived(runs, folder, harm):
    hurt, other = runs
    place = hurt.workspace.folder / folder
    shutil.rmtree(place)
    place.touch()
    go_through(hurt, other, [(folder, harm)], READING[:2])


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("config.yaml", binary, "config.yaml"),
        ("records/train.json", truncate, "train.json cannot be read"),
        ("events/supervisor.jsonl", make_pipe, "supervisor.jsonl: Not a regular file"),
        ("events/ledger-00000000.jsonl", binary, "line 1 of "),
        ("lease/generation-00000001", make_folder, ""),
    ],
)
def test_damaged_run_is_listed_with_its_reason_beside_healthy_runs(runs, name, harm, said):
    hurt, _other = runs
    before = told(["list"], hurt)
    harm(hurt.workspace.folder / name)
    after = told(["list"], hurt)
    assert ("damaged" in after) == bool(said)
    assert said in after
    (line,) = (line for line in before.splitlines() if line.startswith("other"))
    assert line.split() in [item.split() for item in after.splitlines()]


def test_gc_removes_nothing_of_a_damaged_run(runs):
    """The damaged part may be what says which batch to skip or which checkpoint is the best."""
    hurt, _other = runs
    truncate(hurt.workspace.record("preprocess"))
    assert "removed checkpoint step-00000010 of other" in told(["gc"], hurt)
    assert len(list(hurt.workspace.checkpoints.iterdir())) == 3


@pytest.mark.slow
def test_commands_survive_damage_as_processes(runs):
    """These use the entry point's own error handling, exit statuses, and output."""
    hurt, _other = runs
    make_pipe(hurt.workspace.config)
    binary(hurt.workspace.record("preprocess"))
    for command in (["list"], ["explain", "hurt"], ["resume", "hurt"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "steadytrain.pipelines.cli",
                *command,
                "--output",
                str(hurt.workspace.output),
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == (2 if command[0] == "resume" else 0), done.stderr
        assert "config.yaml" in done.stdout + done.stderr


def test_configuration_that_lost_its_end_is_refused_and_named(runs):
    """It is still valid YAML, and the gate would apply its defaults."""
    hurt, other = runs
    text = hurt.workspace.config.read_text()
    hurt.workspace.config.write_text(text[: text.index("\ngate:") + 1])
    for command in (["resume", "hurt"], ["explain", "hurt"], ["list"]):
        assert "cut short after a run saved it: gate (missing)" in told(command, hurt), command
    assert "is not running" in told(["stop", "hurt"], hurt)
    assert "damaged" not in told(["explain", "other"], other)
