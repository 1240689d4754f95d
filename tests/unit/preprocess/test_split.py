from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.preprocess.split import content_id, split_digest
from steadytrain.components.shared.config import DataConfig

from support.data import side_of

DATA = DataConfig(source=["x"], validation_share=0.2, test_share=0.1)


def test_split_shares_are_met() -> None:
    sides = Counter(side_of(content_id(str(number)), None, DATA) for number in range(20_000))
    assert abs(sides["test"] / 20_000 - 0.1) < 0.01
    assert abs(sides["validation"] / 20_000 - 0.2) < 0.01


@given(st.text(), st.text())
def test_group_stays_on_one_side(first: str, second: str) -> None:
    assert side_of(content_id(first), "g", DATA) == side_of(content_id(second), "g", DATA)


def test_another_salt_gives_another_split() -> None:
    other = DATA.model_copy(update={"split_salt": "other"})
    identities = [content_id(str(number)) for number in range(200)]
    sides = [[side_of(one, None, data) for one in identities] for data in (DATA, other)]
    assert sides[0] != sides[1]
    assert split_digest(DATA, {}) != split_digest(other, {})


def test_digest_depends_only_on_what_determines_the_side() -> None:
    longer = DATA.model_copy(update={"sequence_length": 64, "source": ["y"]})
    assert split_digest(longer, {}) == split_digest(DATA, {})
