"""The global batch size stays as the user set it, however it is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.batch import plan_batch


@pytest.mark.parametrize(
    ("batch", "world", "micro", "expected"),
    [
        (32, 1, None, (8, 4)),
        (32, 2, None, (8, 2)),
        (32, 2, 4, (4, 4)),
        (12, 1, None, (6, 2)),
        (14, 2, None, (7, 1)),
        (22, 2, None, (1, 11)),
        (1, 1, None, (1, 1)),
    ],
)
def test_micro_batch_and_accumulation(batch, world, micro, expected):
    plan = plan_batch(batch, world, micro)

    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == expected


@given(share=st.integers(1, 300), world=st.integers(1, 128))
def test_global_batch_never_changes(share, world):
    plan = plan_batch(share * world, world)

    assert plan.global_batch_size == share * world
    assert 1 <= plan.micro_batch_size <= 8


@pytest.mark.parametrize(
    ("batch", "world", "micro", "message"),
    [
        (9, 2, None, "global_batch_size = 9 is not divisible by 2 ranks"),
        (16, 2, 3, "micro_batch_size = 3 does not divide the 8 sequences"),
        (4, 2, 8, "micro_batch_size = 8 does not divide the 2 sequences"),
    ],
)
def test_indivisible_batch_is_rejected(batch, world, micro, message):
    with pytest.raises(BadInput, match=message) as error:
        plan_batch(batch, world, micro)

    assert error.value.remedy
