"""Disable Hypothesis deadlines, and let stacks be without source lines."""

from __future__ import annotations

import functools
import inspect

from hypothesis import settings

# Tests check results, not the speed of a busy machine.
settings.register_profile("steadytrain", deadline=None)
settings.load_profile("steadytrain")

# KFP asks for the stack at each setting of a task, to name its caller in an error. With the
# thousands of modules of a worker, finding the source of every frame takes seconds.
inspect.stack = functools.partial(inspect.stack, context=0)
