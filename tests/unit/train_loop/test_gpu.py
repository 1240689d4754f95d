"""A GPU's utilization, from a library with the interface of NVIDIA's driver."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from steadytrain.components.train.loop.usage import utilization_of

DRIVER = """
#include <string.h>
static int device;
int nvmlInit_v2(void) { return %(init)d; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &device;
    return strcmp(uuid, "GPU-1") != 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned int *rates) {
    rates[0] = 37; rates[1] = 99;
    return handle != &device || %(rates)d;
}
"""


@pytest.fixture
def driver(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) to build the library with")

    def build(*, init=0, rates=0):
        library = tmp_path / "libnvidia-ml.so"
        source = (DRIVER % {"init": init, "rates": rates}).encode()
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source, check=True)
        return str(library)

    return build


def test_utilization_is_a_share(driver):
    assert utilization_of("GPU-1", driver())() == 0.37


@pytest.mark.parametrize("fault", [{"init": 9}, {"rates": 3}])
def test_driver_that_does_not_say_it(driver, fault):
    assert utilization_of("GPU-1", driver(**fault))() is None


def test_gpu_that_the_driver_does_not_have(driver):
    assert utilization_of("GPU-2", driver())() is None


def test_without_a_driver():
    assert utilization_of("GPU-1", "libnothing.so.1")() is None
