"""What a stranger's manifest may make this machine read."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.data.sources import check_url_allowed, check_url_form, is_public
from spes_protocols.errors import NetworkError, UserError


@pytest.mark.parametrize(
    "url",
    [
        "https://data.example.org/a.npy",
        "https://data.example.org:8443/a.npy?version=2",
        "https://[2606:4700::1111]/a.npy",
        "hf://datasets/org/name@main/a.parquet",
        "s3://bucket/key/a.npy",
    ],
)
def test_public_schemes_pass_unasked(url: str) -> None:
    check_url_form(url, [])


@pytest.mark.parametrize(
    "url",
    [
        "http://data.example.org/a.npy",
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://data.example.org/a",
        "data/a.npy",
        "file://server/share/a",
        "file:a",
        "memory://a",
        "simplecache::file:///etc/passwd",
        "https://x::file:///etc/passwd",
        "zip://a::https://data.example.org/a.zip",
        "https://good.example.org@evil.example.org/a",
        "https://user:pass@data.example.org/a",
        "https://good.example.org\\@evil.example.org/a",
        "https://data.example.org/a b",
        "https://data.example.org/a\nb",
        "https://data.example.org:0/a",
        "https://data.example.org:99999/a",
        "https:///a",
        "https://[::1/a",
        "https://data.example.org/a/../b",
        "https://data.example.org/a/%2e%2e/b",
        "https://data.example.org/a/%252e%252e%252fb",
        "s3://user@bucket/a",
        "s3:///a",
        "",
    ],
)
def test_everything_else_is_refused(url: str) -> None:
    with pytest.raises(UserError) as caught:
        check_url_form(url, [])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("http://127.0.0.1:8000/data/a.npy", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/data/a.npy", "http://127.0.0.1:8000/data"),
        ("http://127.0.0.1:8000/data/a.npy", "http://127.0.0.1:8000/data/"),
        ("http://NAS/data", "http://nas:80/data"),
        ("https://127.0.0.1/a", "https://127.0.0.1:443/"),
    ],
)
def test_allowed_prefixes_match(url: str, prefix: str) -> None:
    check_url_allowed(url, ["https://other.example.org/", prefix])


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("http://good.com.evil.com/a", "http://good.com"),
        ("http://evilgood.com/a", "http://good.com"),
        ("http://good.com@evil.com/a", "http://good.com"),
        ("http://good.com:81/a", "http://good.com"),
        ("http://good.com/database/a", "http://good.com/data"),
        ("http://good.com/data/../secret", "http://good.com/data"),
        ("http://good.com/data/%2e%2e/secret", "http://good.com/data"),
        ("http://good.com/data/..%2fsecret", "http://good.com/data"),
        ("http://good.com/a", "https://good.com"),
        ("/a", "http://good.com"),
    ],
)
def test_look_alikes_of_allowed_prefixes_are_refused(url: str, prefix: str) -> None:
    with pytest.raises(UserError):
        check_url_form(url, [prefix])


def test_local_prefixes_follow_links(tmp_path: Path) -> None:
    shared, secret = tmp_path / "shared", tmp_path / "secret"
    shared.mkdir()
    secret.mkdir()
    (shared / "link").symlink_to(secret)
    (tmp_path / "alias").symlink_to(shared)
    check_url_allowed(f"{shared}/a.npy", [str(shared)])
    check_url_allowed(f"file://{shared}/a%20b.npy", [f"file://{shared}/"])
    check_url_allowed(f"{shared}/a.npy", [str(tmp_path / "alias")])
    for path in (f"{shared}/link/a.npy", f"{shared}/../secret/a.npy", f"{shared}2/a.npy", f"{secret}/a.npy"):
        with pytest.raises(UserError):
            check_url_allowed(path, [str(shared)])


def test_the_error_names_the_flag_to_add() -> None:
    with pytest.raises(UserError, match=r"--allow-source http://nas:8000/data/$"):
        check_url_form("http://nas:8000/data/a.npy", [])


def test_an_unclear_prefix_is_an_error() -> None:
    with pytest.raises(UserError, match="host"):
        check_url_form("https://data.example.org/a", ["http://"])


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/a",
        "https://localhost/a",
        "https://2130706433/a",
        "https://0x7f.1/a",
        "https://[::1]/a",
        "https://[::ffff:10.0.0.1]/a",
        "https://192.168.1.1/a",
        "https://169.254.169.254/latest/meta-data",
    ],
)
def test_private_hosts_are_refused(url: str) -> None:
    with pytest.raises((UserError, NetworkError)) as caught:
        check_url_allowed(url, [])
    assert "public" in str(caught.value) or isinstance(caught.value, NetworkError)


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 443)) for host in ("8.8.8.8", "10.0.0.7")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found[:1])
    check_url_allowed("https://data.example.org/a", [])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with pytest.raises(UserError, match=r"10\.0\.0\.7"):
        check_url_allowed("https://data.example.org/a", [])


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(NetworkError, match="does not resolve"):
        check_url_allowed("https://data.example.org/a", [])


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.1.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
    ],
)
def test_other_addresses(address: str) -> None:
    assert not is_public(address)


@given(st.text(max_size=60))
def test_any_text_is_accepted_or_a_user_error(text: str) -> None:
    for url in (text, f"https://{text}", f"https://data.example.org/{text}", f"file://{text}"):
        refusal = None
        try:
            check_url_form(url, [])
        except UserError as error:
            refusal = str(error)
        if refusal is None:
            assert url.partition("://")[0].lower() in ("https", "hf", "s3")
        else:
            assert refusal.isprintable()
