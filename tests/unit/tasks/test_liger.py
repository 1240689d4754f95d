"""Liger's kernel returns the same loss and gradients as the plain computation.

Triton's interpreter runs the kernel itself on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from steadytrain.components.tasks.fused_loss import has_kernel_for

from support.liger import COMPARE


@pytest.mark.long
def test_loss_and_gradients_equal_the_plain_computation():
    # Run it in its own process: the interpreter is chosen when the kernel is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["equal", "True"], done.stderr


def test_cpu_does_not_use_liger():
    assert not has_kernel_for(torch.zeros(2, 3))
