"""Seed all tests, disable Hypothesis deadlines, and let stacks be without source lines."""

from __future__ import annotations

import functools
import inspect
import sys

import pytest
from hypothesis import HealthCheck, settings

from support.isolation import forgetful, isolated
from support.stores import empty_store

__all__ = ["empty_store", "forgetful", "isolated"]

# Tests check results, not the speed of a busy machine, and each run has the same examples.
settings.register_profile(
    "steadytrain",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steadytrain")

# KFP asks for the stack at each setting of a task, to name its caller in an error. With the
# thousands of modules of a worker, finding the source of every frame takes seconds.
inspect.stack = functools.partial(inspect.stack, context=0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let no test's numbers depend on which tests its worker has run before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
