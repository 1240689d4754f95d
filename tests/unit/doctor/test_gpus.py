"""The doctor compares driver and PyTorch, and says why a GPU cannot be used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.pipelines.doctor import Build, Seen, compare, read_gpus

# As nvidia-smi 550 prints it on a machine with one H100 that is divided.
TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15     Driver Version: 550.54.15      CUDA Version: 12.4              |
"""
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a)
  MIG 1g.10gb     Device  0: (UUID: MIG-1)
  MIG 3g.40gb     Device  1: (UUID: MIG-2)
"""
ROW = "0, NVIDIA H100 80GB HBM3, 512 MiB, 81559 MiB, 3 %, 31, 69.4 W, {errors}\n"
GOOD = Build("2.10", "12.8", "91002", "2.27.5", 1)
SEEN = Seen("550.54.15", "12.4", ("0 NVIDIA H100",), ())


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that puts an nvidia-smi first in PATH: there is no GPU here."""

    def write(errors="0", status=0):
        for name, text in {"t": TABLE, "l": LISTED, "q": ROW.format(errors=errors)}.items():
            (tmp_path / name).write_text(text)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in -L) f=l;; --query*) f=q;; *) f=t;; esac\n'
            f"/bin/cat {tmp_path}/$f; exit {status}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return write


def test_essentials_and_mig_profiles_are_read(smi):
    smi()
    seen = read_gpus()
    assert (seen.driver, seen.cuda, seen.mig) == ("550.54.15", "12.4", ("1g.10gb", "3g.40gb"))
    (line,) = seen.gpus
    assert line == "0 NVIDIA H100 80GB HBM3: 512 MiB of 81559 MiB used, 3 % busy, 31 °C, 69.4 W"
    found = {topic: (text, good) for topic, text, good in compare(seen, GOOD)}
    assert found["mig"] == ("2 devices: 1g.10gb, 3g.40gb", True)


def test_memory_errors_are_a_problem(smi):
    smi(errors="2")
    (topic, text, good), *_ = compare(read_gpus(), GOOD)
    assert (topic, good, "2 uncorrected ECC errors" in text) == ("gpu", False, True)


def test_machine_without_a_working_driver_has_no_gpus(smi, monkeypatch, tmp_path):
    smi(status=9)
    assert read_gpus() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert read_gpus() is None


@pytest.mark.parametrize(
    ("driver", "built", "good"),
    [
        ("12.4", "12.8", True),  # minor versions of one major are compatible
        ("13.0", "12.8", True),
        ("11.8", "12.8", False),
        ("12.4", "13.0", False),
    ],
)
def test_driver_must_support_the_major_version_of_the_build(driver, built, good):
    build, seen = replace(GOOD, cuda=built), replace(SEEN, cuda=driver)
    found = {topic: (text, fine) for topic, text, fine in compare(seen, build)}
    text, fine = found["cuda"]
    assert fine is good
    assert f"supports CUDA {driver}; torch 2.10 is built for CUDA {built}" in text
    assert "NCCL 2.27.5" in text
    assert ("update the driver" in text) is not good


def use(build, monkeypatch, visible=None):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return list(compare(SEEN, build))[-1]


@pytest.mark.parametrize("visible", ["-1", ""])
def test_gpu_that_a_variable_hides_is_named(monkeypatch, visible):
    topic, text, good = use(replace(GOOD, count=0), monkeypatch, visible)
    assert (topic, good) == ("gpu use", False)
    assert f"CUDA_VISIBLE_DEVICES={visible!r} hides all of them" in text


def test_gpu_that_pytorch_cannot_use_is_named_with_its_reason(monkeypatch):
    error = "The NVIDIA driver on your system is too old"
    topic, text, good = use(replace(GOOD, count=0, error=error), monkeypatch)
    assert (topic, good, text) == (
        "gpu use",
        False,
        f"a GPU is there, and PyTorch cannot use it: {error}",
    )
    topic, text, good = use(replace(GOOD, cuda="", count=0), monkeypatch)
    assert (good, "is built for the CPU" in text) == (False, True)
    assert use(GOOD, monkeypatch)[0] == "cuda"
