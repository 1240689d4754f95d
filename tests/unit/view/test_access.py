"""Only this machine, or whoever has the token, sees the pages. Every answer has safe headers."""

from __future__ import annotations

import hmac
import logging
import sys

import pytest
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.testclient import TestClient

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.web_server import (
    LOOPBACK,
    accepted_hosts,
    check_token,
    listen,
)
from steadytrain.pipelines import view
from steadytrain.pipelines.view import app
from steadytrain.pipelines.view.app import TOKEN_VARIABLE, application

from support.odd import call

TOKEN = "c4n4ry-0f-the-pages"
HTML = {"accept": "text/html"}
PATHS = ["/", "/runs/x", "/runs/x/log", "/compare", "/events", "/no-such", "//login", "/LOGIN"]


@pytest.fixture
def guarded(source):
    """A client of pages that need a token."""
    app = application(source, hosts=(), token=TOKEN)
    return TestClient(app, base_url="http://example.com", follow_redirects=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8484", "[::1]:8484", "LocalHost"])
def test_own_names_are_accepted(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "[::2]", "127.0.0.2:1"]
)
def test_other_names_are_rejected(client, host):
    """A website whose name resolves to this machine."""
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "evil" not in answer.text


@pytest.mark.parametrize("path", ["/", "/no-such", "/static/view.js", "/events-not"])
def test_every_answer_has_a_strict_policy(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_pages_can_only_be_read(client, method):
    assert client.request(method, "/").status_code == 405
    assert client.request(method, "/login").status_code == 405


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"cookie": "steadytrain="},
        {"cookie": f"steadytrain={TOKEN}"},
        {"cookie": b"steadytrain=\xff"},
    ],
)
def test_no_page_without_the_token(guarded, path, headers):
    assert guarded.get(f"{path}?token={TOKEN}", headers=headers).status_code == 401
    answer = guarded.get(path, headers=headers | HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")


@pytest.mark.parametrize("host", ["example.com/static/?", "example.com/login#"])
def test_host_header_opens_no_page(guarded, host, monkeypatch):
    """Starlette before 1.0 puts the Host header into the address as it is."""
    address = property(lambda self: URL(f"http://{self.headers['host']}{self.scope['path']}"))
    monkeypatch.setattr(Request, "url", address)
    assert guarded.get("/", headers={"host": host}).status_code == 401


def test_token_as_a_bearer_is_enough(guarded):
    assert guarded.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_login_gives_a_cookie_that_is_not_the_token(guarded, source):
    assert guarded.get("/login").status_code == 200
    answer = guarded.post("/login", data={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert guarded.get("/").status_code == 200
    other = TestClient(application(source, hosts=(), token=TOKEN), follow_redirects=False)
    known = cookie.partition(";")[0]
    assert other.get("/", headers={"cookie": known}).status_code == 401


@pytest.mark.parametrize("body", ["", "token=", f"token={TOKEN}x", "token=%00", "x=1", b"\xff"])
def test_wrong_token_is_rejected(guarded, body):
    answer = guarded.post("/login", content=body)
    assert answer.status_code == 403
    assert "That is not the token" in answer.text
    assert "set-cookie" not in answer.headers


def test_long_form_is_rejected(guarded):
    assert guarded.post("/login", content="token=" + "x" * 10_000).status_code == 413


def test_token_is_compared_in_constant_time(guarded, monkeypatch):
    compared, real = [], hmac.compare_digest

    def compare(one, other):
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(app.hmac, "compare_digest", compare)
    guarded.post("/login", data={"token": "wrong"})
    guarded.get("/", headers={"authorization": "Bearer wrong"})
    assert compared[:2] == [(b"wrong", TOKEN.encode())] * 2


def test_token_reaches_no_page_address_or_log(guarded, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    told = [guarded.post("/login", data={"token": TOKEN}), guarded.get("/"), guarded.get("/login")]
    told += [guarded.get("/runs/x"), guarded.post("/login", data={"token": "wrong"})]
    for answer in told:
        assert TOKEN not in answer.text
        assert TOKEN not in str(answer.url)
        assert TOKEN not in str(answer.headers)
    captured = capfd.readouterr()
    assert TOKEN not in caplog.text + captured.out + captured.err


@pytest.mark.parametrize(
    ("host", "token", "is_fine"),
    [
        ("127.0.0.1", "", True),
        ("localhost", "", True),
        ("::1", "", True),
        ("127.0.0.1", TOKEN, True),
        ("0.0.0.0", TOKEN, True),
        ("0.0.0.0", "", False),
        ("::", "", False),
        ("192.168.1.5", "", False),
        ("example.com", "", False),
        ("", "", False),
        ("127.0.0.1", "tiny", False),
        ("0.0.0.0", "tiny", False),
    ],
)
def test_addresses_that_others_reach_need_a_token(host, token, is_fine):
    if is_fine:
        check_token(host, token, TOKEN_VARIABLE)
        return
    with pytest.raises(BadInput, match="STEADYTRAIN_UI_TOKEN") as found:
        check_token(host, token, TOKEN_VARIABLE)
    assert "openssl rand" in found.value.remedy
    assert not token or token not in str(found.value)


def test_names_in_the_host_header_follow_from_the_address():
    assert accepted_hosts("localhost") == LOOPBACK
    assert accepted_hosts("0.0.0.0") == accepted_hosts("::") == ()
    assert accepted_hosts("Training.example") == ("training.example",)
    assert accepted_hosts("192.168.1.5") == ("192.168.1.5",)


def test_port_in_use_and_foreign_address_are_bad_input():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
    with pytest.raises(BadInput, match="cannot listen on"):
        listen("x" * 300, 0)
    with pytest.raises(BadInput, match="cannot listen on"):
        listen("203.0.113.1", 0)


def test_command_refuses_other_addresses_without_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("STEADYTRAIN_UI_TOKEN", raising=False)
    done = call("ui", "--host", "0.0.0.0", folder=tmp_path)
    assert (done.code, "STEADYTRAIN_UI_TOKEN is not set" in done.err) == (2, True)


def test_command_names_the_packages_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.delattr(view, "app")
    monkeypatch.delitem(sys.modules, "steadytrain.pipelines.view.app")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = call("ui", folder=tmp_path)
    assert (done.code, "pip install 'steadytrain[ui]'" in done.err) == (2, True)
