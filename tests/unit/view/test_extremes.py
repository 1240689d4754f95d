"""Values in a run's files that no program of ours writes lead to pages, never to an error."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "config",
    [
        'a: "\\ud800"\n',
        f"a: 0x{'f' * 4000}\n",
        "a: .nan\nb: -.inf\n",
        "a: 1e400\n",
        "a: 2020-01-01\n",
    ],
    ids=["half a character", "huge number", "not a number", "too large", "date"],
)
@pytest.mark.parametrize("page", ["/", "/runs/odd", "/compare?run=odd&run=even"])
def test_odd_configuration_is_shown(client, make_run, output, config, page):
    make_run("odd")
    make_run("even")
    (output / "runs" / "odd" / "config.yaml").write_text(config)
    answer = client.get(page)
    assert answer.status_code == 200
    assert "odd" in answer.text


@pytest.mark.parametrize(
    "value", ["-1", "9" * 400, "nan", "1e308", "%00", "%ED%A0%80", "%F0%9F%92"]
)
@pytest.mark.parametrize(
    "address",
    ["/?page={}", "/?sort={}", "/?q={}", "/runs/{}", "/runs/odd/log?file={}", "/compare?run={}"],
)
def test_odd_address_is_no_error_of_ours(client, make_run, address, value):
    make_run("odd")
    assert client.get(address.format(value)).status_code in (200, 404)
