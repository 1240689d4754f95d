"""The table of GPUs, names as people write them, and user-defined prices."""

from __future__ import annotations

import itertools

import pytest

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import (
    GIB,
    advice,
    all_gpus,
    find_gpu,
    known_gpu,
    priced,
    smallest_gpu,
)


def test_gpu_table_matches_the_rules():
    table = {
        gpu.name: (gpu.memory_gb, gpu.speed, gpu.usd_per_hour)
        for gpu in map(find_gpu, ["t4", "v100", "a100-40", "a100-80", "h100"])
    }
    assert table == {
        "T4": (16, 1, 0.35),
        "V100": (32, 3, 2.50),
        "A100-40": (40, 5, 3.50),
        "A100-80": (80, 5, 5.00),
        "H100": (80, 8, 8.00),
    }


def test_speeds_follow_the_throughput_of_the_data_sheets():
    known = [(gpu.half_tflops, gpu.speed) for gpu in map(find_gpu, RULE)]
    beyond = (10 * known[-1][0], 10 * known[-1][1])
    rule = [(0, 0), *known, beyond]
    for gpu in all_gpus():
        if gpu.name in RULE:
            continue
        (x0, y0), (x1, y1) = next(
            pair for pair in itertools.pairwise(rule) if pair[0][0] < gpu.half_tflops <= pair[1][0]
        )
        derived = y0 + (y1 - y0) * (gpu.half_tflops - x0) / (x1 - x0)
        assert gpu.speed == pytest.approx(derived, abs=0.06), gpu.name


RULE = ["T4", "V100", "A100-80", "H100"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4050", "RTX4050"),
        ("NVIDIA GeForce RTX 4050 Laptop GPU", "RTX4050"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("a100", "A100-80"),
        ("Tesla-T4", "T4"),
        ("Tesla-V100-PCIE-32GB", "V100"),
        ("Tesla-V100-SXM3-32GB", "V100"),
        ("Tesla-V100-SXM2-16GB", "V100-16"),
        ("NVIDIA-RTX-A6000", "A6000"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80"),
        ("NVIDIA-A100-80GB-PCIe", "A100-80"),
        ("NVIDIA-A100-PCIE-40GB", "A100-40"),
        ("NVIDIA-A10G", "A10"),
        ("NVIDIA-L4", "L4"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA-H100-PCIe", "H100"),
        ("NVIDIA-H200", "H200"),
        ("NVIDIA-GeForce-RTX-4060-Laptop-GPU", "RTX4060"),
    ],
)
def test_gpu_names_are_parsed_as_people_and_drivers_write_them(written, name):
    assert find_gpu(written).name == name


def test_gpu_with_other_memory_is_another_gpu():
    with pytest.raises(BadInput):
        find_gpu("NVIDIA-H100-NVL")


@pytest.mark.parametrize(
    "written",
    ["A100-80-MIG-3g.40gb", "a100-3g.40gb", "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"],
)
def test_mig_device_has_its_memory_and_its_share_of_the_slices(written):
    whole, part = find_gpu("a100-80"), find_gpu(written)
    assert (part.name, part.memory_gb, part.mig) == ("A100-80-MIG-3g.40gb", 40, ())
    assert part.half_tflops == pytest.approx(whole.half_tflops * 3 / 7)
    assert part.usd_per_hour is part.spot_usd_per_hour is None
    assert (whole.resource, part.resource) == ("nvidia.com/gpu", "nvidia.com/mig-3g.40gb")
    # Of a node label, --cluster knows complete GPUs only.
    assert known_gpu(written) is None


def test_largest_mig_profile_is_the_whole_gpu():
    for gpu in all_gpus():
        for profile in gpu.mig:
            assert gpu.part(profile).memory <= gpu.memory
        if gpu.mig:
            assert gpu.part(gpu.mig[-1]).speed == gpu.speed


@pytest.mark.parametrize(
    ("name", "fix"), [("a100-40-1g.20gb", "one of 1g.5gb"), ("t4-mig-1g.5gb", "A30, A100-40")]
)
def test_unknown_mig_profile_names_those_that_exist(name, fix):
    with pytest.raises(BadInput, match="MIG profile") as error:
        find_gpu(name)
    assert fix in error.value.remedy


def test_unknown_gpu_is_an_error_that_lists_the_known_gpus():
    with pytest.raises(BadInput, match="'tpu-v5'") as error:
        find_gpu("tpu-v5")
    assert "RTX4050" in error.value.remedy


def test_gpu_names_are_unambiguous():
    names = [alias.lower() for gpu in all_gpus() for alias in (gpu.name, *gpu.aliases)]
    assert len(set(names)) == len(names)


def test_own_prices_replace_the_table(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("h100: {usd_per_hour: 2.5, spot_usd_per_hour: 1.1}\ncpu: {usd_per_hour: 0.2}\n")
    gpus, core, _ = priced(path)
    assert core == 0.2
    h100, t4 = find_gpu("h100", gpus), find_gpu("t4", gpus)
    assert (h100.usd_per_hour, h100.spot_usd_per_hour, h100.memory_gb) == (2.5, 1.1, 80)
    assert t4.usd_per_hour is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100: {usd_per_hour: -1}", r"h100\.usd_per_hour"),
        ("h100: {usd: 1}", r"h100\.usd"),
        ("h100: {", "not valid YAML"),
        ("tpu: {}", "'tpu'"),
        (None, "no such file"),
    ],
)
def test_unreadable_prices_are_an_error(tmp_path, text, message):
    path = tmp_path / "prices.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        priced(path)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("needed", "said"),
    [(0, ""), (5 * 2**20, "5.24 MB"), (GIB, "RTX4050"), (400 * GIB, "no single GPU has that much")],
)
def test_requirements_are_interpreted(needed, said):
    assert said in advice(needed)
    assert bool(advice(needed)) == bool(needed)


def test_smallest_sufficient_gpu_is_found():
    found = smallest_gpu(30 * 10**9)
    assert found is not None
    assert found.memory >= 30 * 10**9
    assert all(gpu.memory < 30 * 10**9 for gpu in all_gpus() if gpu.memory < found.memory)
