"""Trials that train at once divide the cores and the GPUs of the machine."""

from __future__ import annotations

import os
import stat

import pytest

from steadytrain.components.shared.config import ComputeConfig, load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tune.trials.base import divide, imports_of, most_at_once


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Make a machine with four GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in *name*) echo H100;; *) seq 0 3;; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_cores_are_divided_among_trials_and_their_ranks(cores):
    slots = divide(ComputeConfig(device="cpu", nproc_per_node=2), 2)
    assert [slot.threads for slot in slots] == [2, 2]
    assert slots[0].environment == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_trials_share_what_their_framework_and_their_scores_import():
    lightgbm = ("steadytrain.components.tabular.learners.boosting", "lightgbm")
    found = imports_of(load("tabular"), scored=True)
    scored = {"steadytrain.components.tabular.scoring", "steadytrain.components.preprocess.step"}
    assert {*lightgbm, *scored} <= {*found}
    assert not scored & {*imports_of(load("tabular"), scored=False)}
    assert not {*lightgbm} & {*imports_of(load("causal-lm"), scored=False)}


def test_as_many_trials_train_at_once_as_have_cores_or_gpus(cores, nvidia_smi):
    assert most_at_once(ComputeConfig(device="cpu")) == 8
    assert most_at_once(ComputeConfig(device="cpu", nproc_per_node=3)) == 2
    assert most_at_once(ComputeConfig()) == 4
    assert most_at_once(ComputeConfig(nproc_per_node=8)) == 1


def test_more_trials_than_cores_have_a_thread_each(cores):
    assert [slot.threads for slot in divide(ComputeConfig(device="cpu"), 9)] == [1] * 9


def test_each_rank_has_a_gpu_of_its_own(cores, nvidia_smi):
    slots = divide(ComputeConfig(nproc_per_node=2), 2)
    assert [slot.gpus for slot in slots] == [("0", "1"), ("2", "3")]
    assert slots[1].environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_only_visible_gpus_are_divided(cores, nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    assert [slot.gpus for slot in divide(ComputeConfig(), 2)] == [("3",), ("GPU-5a",)]


def test_too_few_gpus_are_bad_input(cores, nvidia_smi):
    with pytest.raises(BadInput, match="needs 6 GPUs, and this machine has 4") as error:
        divide(ComputeConfig(nproc_per_node=2), 3)
    assert error.value.remedy == "train 2 trials at once"


def test_several_nodes_are_bad_input():
    with pytest.raises(BadInput, match=r"compute\.nodes = 2"):
        divide(ComputeConfig(nodes=2), 1)
