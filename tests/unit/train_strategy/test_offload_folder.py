"""The folder for optimizer states on disk, and the refusal of a run that lacks the tools for it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from steadytrain.components.shared import toolchain
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.train.loop import setup
from steadytrain.components.train.loop.control import Watch
from steadytrain.components.train.offloaded import folder_of, swept
from steadytrain.components.train.strategy.zero_config import zero_config
from steadytrain.pipelines import doctor
from steadytrain.pipelines.early_checks import check_tools, here

from support.scoring import fresh
from support.training import Bench, packed_row, write_data


@pytest.fixture
def configured(tmp_path):
    def make(**compute):
        content = {"name": "tiny", "run": "tiny", "output": str(tmp_path)}
        content |= {"data": {"source": ["unused"]}, "model": {"config": {"model_type": "llama"}}}
        return from_mapping({**content, "compute": {"strategy": "zero3", **compute}})

    return make


def test_each_node_of_a_run_has_a_folder_of_its_own(configured, tmp_path):
    assert folder_of(configured(), 0) is None
    own = configured(offload="disk")
    assert folder_of(own, 1) == tmp_path / "runs/tiny/offloaded/node-1"
    elsewhere = configured(offload="disk", offload_path="/nvme")
    assert [str(folder_of(elsewhere, node)) for node in (0, 1)] == [
        "/nvme/tiny/node-0",
        "/nvme/tiny/node-1",
    ]


def fail_with_files(folder):
    with swept(folder):
        assert not folder.exists()
        folder.mkdir(parents=True)
        (folder / "new.swp").touch()
        raise KeyError


def test_files_are_removed_before_and_after_and_others_stay(tmp_path):
    folder, others = tmp_path / "disk/tiny/node-0", tmp_path / "disk/other"
    others.mkdir(parents=True)
    folder.mkdir(parents=True)
    (folder / "left.swp").touch()
    with pytest.raises(KeyError):
        fail_with_files(folder)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["other"]


def test_deepspeed_has_a_buffer_for_each_tensor_of_a_group(tmp_path):
    made = zero_config(
        stage=3, bf16=True, offload="disk", parameters=9, trained=9, tensors=1, folder=tmp_path
    )
    held = made["zero_optimization"]["offload_optimizer"]
    assert held == {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}


@pytest.fixture
def without_libaio(tmp_path, monkeypatch):
    """A compiler that cannot link."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def test_missing_libaio_is_named_before_a_run_starts(without_libaio, configured):
    assert "libaio" in toolchain.missing_for_disk()
    asking = configured(offload="disk")
    with pytest.raises(ConfigError, match=r"(?s)compute\.offload = 'disk': .* libaio.*libaio-dev"):
        check_tools(asking)
    check_tools(configured())
    check_tools(configured(offload="disk", launcher="trainjob"))
    assert "libaio" in "\n".join(here(asking))
    found = [doctor._offload(config) for config in (None, configured(), asking)]
    assert [finding.good for finding in found] == [True, True, False]
    assert all("libaio-dev" in finding.text for finding in found)


@pytest.mark.parametrize(("launcher", "remarks"), [("process", 2), ("pytorchjob", 0)])
def test_validate_names_missing_compilers_where_the_run_trains(
    monkeypatch, configured, launcher, remarks
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = configured(offload="disk", launcher=launcher)
    compiling = config.training.model_copy(update={"torch_compile": True})
    found = [*here(config.model_copy(update={"training": compiling}))]
    assert len(found) == remarks
    assert all("no-such-compiler" in remark for remark in found)


def test_libaio_is_found_if_a_program_links_with_it(tmp_path, monkeypatch):
    """The compiler here keeps its arguments and succeeds."""
    compiler, kept = tmp_path / "c++", tmp_path / "arguments"
    compiler.write_text(f'#!/bin/sh\nprintf "%s " "$@" > {kept}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LDFLAGS", "-L/opt/aio")
    assert "libaio" not in toolchain.missing_for_disk()
    assert kept.read_text().endswith(f"-o {os.devnull} -L/opt/aio -laio ")


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_rank_says_that_compiling_takes_minutes_before_it_begins(tmp_path, monkeypatch, offload):
    """The stand-in is where DeepSpeed compiles."""
    generator = np.random.default_rng(1)
    rows = [packed_row([8, 4], generator) for _ in range(4)]
    data = write_data(tmp_path / "data", rows, rows[:2])
    bench = Bench.make(tmp_path, data, training={"global_batch_size": 2, "max_steps": 2})
    said = []

    def ready(*_, **__):
        raise KeyError(*said)

    monkeypatch.setattr(setup, "make_ready", ready)
    fresh()
    with pytest.raises(KeyError) as stopped:
        setup.set_up(
            bench.config, data, BatchSettings(2, offload=offload), watch=Watch(warn=said.append)
        )
    told = [text for text in stopped.value.args if "async_io" in text]
    assert len(told) == (offload == "disk")
    assert all("compute.offload = disk" in text and "takes minutes" in text for text in told)
