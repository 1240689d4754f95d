"""Names of profiles."""

from __future__ import annotations

from steadytrain.pipelines.profile_command import profile_name


def test_runs_with_long_names_have_profiles_of_their_own():
    names = {profile_name("a" * 50 + end) for end in "bc"}
    assert len(names) == 2
    assert {len(name) for name in names} == {len(profile_name("a" * 44))}
    assert profile_name("mine") == "mine-profile"
