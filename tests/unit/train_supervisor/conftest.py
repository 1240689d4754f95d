"""Runs whose ranks are a small program that behaves as a test asks."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import ComputeConfig, from_mapping
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.supervisor import Supervisor

from support import command

RANK = Path(__file__).with_name("rank.py")


@pytest.fixture
def launcher():
    with contextlib.ExitStack() as made:

        def make(how, *, ranks=1, threads=1):
            compute = ComputeConfig(nproc_per_node=ranks, threads_per_rank=threads)
            program = [sys.executable, str(RANK), how]
            return made.enter_context(ProcessLauncher(compute, program, imports=()))

        yield make


@pytest.fixture
def make_folder(tmp_path, config):
    """Make an attempt's folder that says what to run. The lease lasts longer than any test."""

    def make(*, attempt=1, lease_seconds=3600.0, **recovery):
        folder = AttemptFolder(tmp_path / "attempts" / f"{attempt:04d}")
        told = {"lease_seconds": lease_seconds, **recovery}
        settings = config.recovery.model_copy(update=told)
        changed = config.model_copy(update={"recovery": settings})
        (tmp_path / "config.yaml").write_text(changed.to_yaml())
        AttemptSpec(
            attempt=attempt,
            run_id=config.run_id,
            config=str(tmp_path / "config.yaml"),
            data="",
            batch=BatchSettings(8),
            gradient_accumulation_steps=1,
            generation=1,
        ).save(folder.spec)
        return folder

    return make


@pytest.fixture
def folder(make_folder):
    return make_folder()


@pytest.fixture
def config(tmp_path):
    return from_mapping(
        {
            "name": "tiny",
            "run": "tiny",
            "output": str(tmp_path / "output"),
            "data": {"source": ["unused"]},
            "model": {"config": {"model_type": "llama"}},
            "training": {"global_batch_size": 8},
            "compute": {"device": "cpu"},
            "recovery": {
                "stop_grace_seconds": 300,
                "backoff_seconds": 0,
                "breaker_reset_seconds": 0,
            },
        }
    )


@pytest.fixture
def workspace(config):
    return Workspace.of(config)


@pytest.fixture
def data(tmp_path):
    return DataRecord(
        folder=str(tmp_path),
        fingerprint="f" * 64,
        task="causal_lm",
        sides={"train": SideRecord(shards=[], rows=100, documents=100)},
        test_records="",
        split_digest="",
    )


@pytest.fixture
def supervisor(config, data, launcher):
    def make(how, *, ranks=1, run=None, model=None, training=None, recovery=None, **options):
        changes = {"run": run, "model": model, "training": training, "recovery": recovery}
        content = config.model_dump() | {key: value for key, value in changes.items() if value}
        return Supervisor(from_mapping(content), data, launcher(how, ranks=ranks), **options)

    return make


@pytest.fixture
def held(workspace):
    """Return a function that holds a supervisor's lease."""

    def hold_it(seconds):
        return hold(LocalStorage(workspace.lease), run_id="tiny", seconds=seconds)

    return hold_it


@pytest.fixture
def wait_for():
    return command.wait_for
