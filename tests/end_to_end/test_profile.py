"""`steadytrain profile` trains a few steps in a run of its own, and says where their time goes."""

from __future__ import annotations

import json

import pytest

from support.command import TINY_LM


@pytest.mark.long
def test_profile_is_a_run_of_its_own_and_replaces_only_profiles(steadytrain):
    def profile(*more):
        place = ("--run", "tiny", "--output", steadytrain.output)
        return steadytrain("profile", "causal-lm", *place, *more, sets=TINY_LM)

    done = profile()
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("steps 11 to 15 of 1 rank on cpu: ")
    assert len(lines) <= 10
    (run,) = done.runs
    assert run.name == "tiny-profile"
    assert (run / "profile" / "rank-0.trace.json.gz").is_file()
    again = profile("--json", "--steps", "2")
    assert again.code == 0, again.err
    assert {"data", "forward", "backward", "optimizer"} <= json.loads(again.out)["shares"].keys()
    config = run / "config.yaml"
    # Without its first line, which has its digest, it may be edited.
    text = config.read_text().partition("\n")[2]
    config.write_text(text[: text.index("  profile:")] + text[text.index("  full_determinism:") :])
    refused = profile()
    assert refused.code != 0
    assert "'tiny-profile' exists and is not a profile" in refused.err
