"""Names of profiles."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.errors import Stopped
from steadytrain.components.train.recovery.outcome import Outcome
from steadytrain.pipelines.plan_commands import profile, profile_name


def test_runs_with_long_names_have_profiles_of_their_own():
    names = {profile_name("a" * 50 + end) for end in "bc"}
    assert len(names) == 2
    assert {len(name) for name in names} == {len(profile_name("a" * 44))}
    assert profile_name("mine") == "mine-profile"


@pytest.mark.parametrize(("outcome", "status"), [("preempted", 143), ("stopped", 130)])
def test_profile_that_is_stopped_says_so(outcome, status, tmp_path, monkeypatch, capfd):
    ended = Outcome(outcome=outcome, step=3, attempts=1, seconds=1.0)
    monkeypatch.setattr("steadytrain.components.train.step.run", lambda *_: ended)
    monkeypatch.setattr("steadytrain.components.preprocess.step.run", lambda _: None)
    monkeypatch.setattr("steadytrain.pipelines.early_checks.check_plugins", lambda _: None)
    with pytest.raises(Stopped) as caught:
        profile("causal-lm", output=str(tmp_path))
    assert caught.value.code == status
    assert "stopped before the profile was complete" in capfd.readouterr().err
