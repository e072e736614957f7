"""Files by URL: which may be read at all, and how one gets here whole. What arrives goes into `cache`.

Everything is read through fsspec: https and http as one stream that goes on with a range request wherever it broke;
hf, s3 and local files in ranged blocks. A manifest is a stranger's text, so its URLs are checked before anything is
opened (SPEC 9.3): https, hf and s3 at public addresses, else only what the volunteer allowed. Redirects are followed
here, each hop under the same check, and each connection's own address is looked at once more when it is made, so
neither a redirect nor a name that resolves differently the second time leads into the home network.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import aiohttp
import fsspec

from spes_p2p.data.cache import disk_errors
from spes_protocols.errors import NetworkError, UserError

Read = Callable[[int], bytes]
Report = Callable[[str, float], None]
"""Progress for a person: what is being done, and the fraction that is done. `StoppedError` from it ends the work."""

_BLOCK_BYTES = 1 << 16
"""Bytes of one read. A client buffers about as much again, and what it holds is lost when a connection breaks."""

_RANGE_BYTES = 8 << 20
_HOPS_MAX = 5
_BACKOFF_SECONDS_MAX = 30.0
_PUBLIC_SCHEMES = ("https", "hf", "s3")
_SCHEMES = (*_PUBLIC_SCHEMES, "http", "file")
_DEFAULT_PORTS = {"https": 443, "http": 80}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\.?|\[[0-9A-Fa-f:.]+\]")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one fetch. A file has `deadline_seconds` plus its size at `bytes_per_second_min` in all.

    A connection that breaks costs the bytes that were not yet read from it, a few hundred KiB at most.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    attempts_max: int = 6
    """Tries in a row that bring nothing new."""
    backoff_seconds: float = 0.5
    deadline_seconds: float = 600.0
    bytes_per_second_min: int = 32_768


class StoppedError(Exception):
    """The fetch was asked to stop; what has arrived stays for the next one."""


# --- Which URLs may be read ------------------------------------------------------------------------------------------


def check_url_form(url: str, allow: Sequence[str]) -> None:
    """Refuse a URL by what it says, without asking the network (SPEC 9.3).

    `allow` holds the volunteer's prefixes: a path, or a URL with a host and any path. A prefix matches whole path
    segments of the same scheme, host and port. Raises `UserError`.
    """
    parts = _parse(url)
    if _is_allowed(parts, allow):
        return
    if parts.scheme not in _PUBLIC_SCHEMES:
        raise UserError(
            f"the manifest names {_shown(url)}, and only {', '.join(_PUBLIC_SCHEMES)} are read unasked: "
            f"if you trust it, add --allow-source {_suggestion(url, parts)}"
        )


def check_url_allowed(url: str, allow: Sequence[str]) -> None:
    """`check_url_form`, and a host that is not on the `allow` list must have public addresses only.

    Raises `UserError` for a URL that may not be read and `NetworkError` when its host's name does not resolve.
    """
    check_url_form(url, allow)
    parts = _parse(url)
    if parts.scheme == "https" and not _is_allowed(parts, allow):
        _check_host(url, parts)


def _check_host(url: str, parts: SplitResult) -> None:
    host = parts.hostname or ""
    try:
        found = socket.getaddrinfo(host, parts.port or 443, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NetworkError(f"the host {host} of {_shown(url)} does not resolve: {error.strerror or error}") from None
    for *_, address in found:
        if not is_public(str(address[0])):
            raise UserError(
                f"{_shown(url)} leads to {address[0]}, which is no public address: if you trust it, "
                f"add --allow-source {_suggestion(url, parts)}"
            )


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, loopback, link-local, reserved, multicast."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:  # an IPv6-only network's name for an IPv4 address
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        elif found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found.sixtofour is not None:  # carries an IPv4 address that a gateway would unwrap
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _parse(url: str) -> SplitResult:
    """A URL or plain path taken apart, refused when two readers could understand it differently."""
    if not url.isprintable() or " " in url or "\\" in url:
        raise UserError(f"{_shown(url)} is no plain URL: it has spaces, control characters or backslashes")
    try:
        parts = urlsplit(url) if "://" in url else SplitResult("file", "", url, "", "")
        port = parts.port
    except ValueError as error:
        raise UserError(f"{_shown(url)} is no URL: {error}") from None
    if parts.scheme not in _SCHEMES:
        raise UserError(f"{_shown(url)}: the scheme {parts.scheme!r} is none of {', '.join(_SCHEMES)}")
    if _climbs(parts.path):
        raise UserError(f"{_shown(url)} has '..' in its path: write the path without it")
    if parts.scheme == "file":
        if "://" in url:
            parts = parts._replace(path=unquote(parts.path))
        if parts.netloc not in ("", "localhost") or parts.query or not parts.path.startswith("/"):
            raise UserError(f"{_shown(url)} is no absolute path: write file:///path or /path")
    elif parts.scheme == "s3":
        if not _BUCKET.fullmatch(parts.netloc):
            raise UserError(f"{_shown(url)} names no bucket: write s3://bucket/key")
    elif parts.scheme != "hf" and (not _HOST.fullmatch(_host(parts)) or port == 0):
        raise UserError(f"{_shown(url)} has no plain host name: write {parts.scheme}://host[:port]/path")
    return parts


def _host(parts: SplitResult) -> str:
    """The host as written, in brackets for IPv6; with user and password still in it, so that these are refused."""
    return re.sub(r":\d*$", "", parts.netloc)


def _climbs(path: str) -> bool:
    """Whether a path has a '..' segment, also when a server would decode it (twice)."""
    for _ in range(3):
        if ".." in re.split(r"[/\\]", path):
            return True
        path = unquote(path)
    return False


def _is_allowed(parts: SplitResult, allow: Sequence[str]) -> bool:
    return any(_matches(parts, _parse(prefix)) for prefix in allow)


def _matches(parts: SplitResult, prefix: SplitResult) -> bool:
    if _place(parts) != _place(prefix):
        return False
    path, start = parts.path, prefix.path
    if parts.scheme == "file":  # links count as what they point at
        path, start = os.path.realpath(path), os.path.realpath(start)
    start = start.rstrip("/")
    return path == start or path.startswith(start + "/")


def _place(parts: SplitResult) -> tuple[str, str, int | None]:
    if parts.scheme == "file":
        return "file", "", None
    if parts.scheme in _DEFAULT_PORTS:
        return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or _DEFAULT_PORTS[parts.scheme]
    return parts.scheme, parts.netloc, None


def _suggestion(url: str, parts: SplitResult) -> str:
    """The prefix a volunteer would allow: the URL's folder."""
    return _shown(url.rpartition("/")[0] + "/" if parts.path.strip("/") else url)


def _shown(text: object, length_max: int = 200) -> str:
    """Text from outside as part of one line on a terminal."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return shown if len(shown) <= length_max else shown[: length_max - 3] + "..."


# --- Fetching one file -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """Fetches files under one volunteer's rules: `allow` as in `check_url_form`; `stop` ends it early when set."""

    allow: Sequence[str]
    report: Report
    limits: Limits = field(default_factory=Limits)
    stop: threading.Event = field(default_factory=threading.Event)

    def fetch(self, part: Path, url: str, sha256_hex: str, size: int) -> None:
        """Complete the file `part` from `url` and verify it; bytes that `part` holds already are gone on from.

        Raises `UserError` in one line when the file cannot be read or has another size or digest, `StoppedError` once
        `stop` is set. Only a wrong digest empties `part`.
        """
        for last_try in (False, True):
            in_one_go = self._complete(part, url, size)
            found = file_digest(part)
            if found == sha256_hex:
                return
            with disk_errors(part):
                os.truncate(part, 0)
            # Pieces of two tries may come from two versions of the file, or from before a crash: once more in one go.
            if last_try or in_one_go:
                raise UserError(
                    f"{_shown(url)} is not the file the manifest names: its digest is {found} instead of {sha256_hex}; "
                    "ask the organizer which is right"
                )

    def _complete(self, part: Path, url: str, size: int) -> bool:
        """Append to `part` until it has `size` bytes; whether one answer brought all of them."""
        limits = self.limits
        deadline = time.monotonic() + limits.deadline_seconds + size / limits.bytes_per_second_min
        began = best = have = part.stat().st_size
        answers, failures = 0, 0
        while have < size:
            answers += 1
            cause = "the connection ended early"
            try:
                with self._opened(url, have, size, deadline) as (start, read):
                    self._append(part, url, start, size, read)
            except (StoppedError, UserError):
                raise
            except Exception as error:  # each file system raises its own; every one is a failed try with a cause
                cause = _cause(error)
                if _is_final(error):
                    raise UserError(f"cannot read {_shown(url)}: {cause}; check the URL with the organizer") from error
            have = part.stat().st_size
            failures = 0 if have > best else failures + 1
            best = max(best, have)
            pause = min(limits.backoff_seconds * 2**failures, _BACKOFF_SECONDS_MAX)
            if have < size and (failures >= limits.attempts_max or time.monotonic() + pause > deadline):
                raise UserError(
                    f"cannot read {_shown(url)}: {cause} ({best} of {size} bytes came); "
                    "check the connection, then start again: it goes on from there"
                )
            if have < size and self.stop.wait(pause):
                raise StoppedError
        return began == 0 and answers == 1

    def _append(self, part: Path, url: str, start: int, size: int, read: Read) -> None:
        """Write what `read` yields from byte `start` of the file on; `start` is 0 where a server knows no ranges."""
        with disk_errors(part):
            os.truncate(part, start)
            file = part.open("ab")
        with file:
            while True:
                if self.stop.is_set():
                    raise StoppedError
                block = read(_BLOCK_BYTES)
                if not block:
                    return
                start += len(block)
                if start > size:
                    raise _wrong_size(url, f"more than {size}", size)
                with disk_errors(part):
                    file.write(block)
                    file.flush()
                self.report(f"fetching {_shown(url, 80)}", start / size)

    @contextmanager
    def _opened(self, url: str, offset: int, size: int, deadline: float) -> Iterator[tuple[int, Read]]:
        """Where the bytes begin, `offset` or 0, and a function that reads up to n of the following ones."""
        check_url_allowed(url, self.allow)
        parts = _parse(url)
        allowed = _is_allowed(parts, self.allow)
        if parts.scheme in _DEFAULT_PORTS:
            with self._opened_http(url, offset, size, deadline) as opened:
                yield opened
            return
        path = parts.path if parts.scheme == "file" else parts.netloc + parts.path
        system = _file_system(parts.scheme, allowed, self.limits)
        found = system.size(path)
        if found != size:
            raise _wrong_size(url, found, size)
        with system.open(path, "rb", block_size=_RANGE_BYTES, cache_type="readahead") as file:
            file.seek(offset)

            def read(length: int) -> bytes:
                if time.monotonic() > deadline:
                    raise TimeoutError("too slow")
                return bytes(file.read(length))

            yield offset, read

    @contextmanager
    def _opened_http(self, url: str, offset: int, size: int, deadline: float) -> Iterator[tuple[int, Read]]:
        """`_opened` for http(s): one request, with a range unless it starts at 0, after any redirects."""
        limits = self.limits
        for _ in range(_HOPS_MAX):
            check_url_allowed(url, self.allow)
            parts = _parse(url)
            timeout = aiohttp.ClientTimeout(
                total=max(deadline - time.monotonic(), 1.0),
                sock_connect=limits.connect_seconds,
                sock_read=limits.read_seconds,
            )
            headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-"}
            if not offset:
                del headers["Range"]
            file = _http(_is_allowed(parts, self.allow)).open(
                url, "rb", block_size=0, size=size, headers=headers, timeout=timeout, allow_redirects=False
            )
            with file:
                location = file.r.headers.get("Location")
                if 300 <= file.r.status < 400 and location:
                    url = urljoin(url, location)
                    continue
                yield _first_byte(url, file.r, offset, size), file.read
                return
        raise UserError(f"{_shown(url)} redirects more than {_HOPS_MAX} times; ask the organizer for a direct URL")


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    with disk_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_byte(url: str, response: aiohttp.ClientResponse, offset: int, size: int) -> int:
    """Where the body of an answer begins; its length in all must be what the manifest says, where it is told."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != offset:
            raise OSError("the server answers with another range than the one asked for")
        start, total = offset, None if match[2] == "*" else int(match[2])
    elif response.status == 200:
        start, total = 0, response.content_length
    else:
        raise OSError(f"the server answers with status {response.status}")
    if total is not None and total != size:
        raise _wrong_size(url, total, size)
    return start


def _wrong_size(url: str, found: object, size: int) -> UserError:
    return UserError(
        f"{_shown(url)} is not the file the manifest names: it has {found} bytes instead of {size}; "
        "ask the organizer which is right"
    )


def _is_final(error: Exception) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, aiohttp.ClientResponseError):
        return 400 <= error.status < 500 and error.status not in (408, 425, 429)
    return isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)


def _cause(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"the server answers with status {error.status} {_shown(error.message, 60)}".rstrip()
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return _shown(error) or type(error).__name__


@functools.cache
def _http(allowed: bool) -> Any:
    """An HTTP file system of fsspec; unless the URL is allowed, one whose connections end at public addresses only."""
    return fsspec.filesystem(
        "http",
        get_client=_any_client if allowed else _guarded_client,
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@functools.cache
def _file_system(scheme: str, allowed: bool, limits: Limits) -> Any:
    """A file system for hf, s3 and local files; the volunteer's own credentials serve allowed URLs only."""
    try:
        if scheme == "hf":
            return fsspec.filesystem("hf", token=None if allowed else False)
        if scheme == "s3":
            timeouts = {"connect_timeout": limits.connect_seconds, "read_timeout": limits.read_seconds}
            return fsspec.filesystem("s3", anon=not allowed, config_kwargs=timeouts)
    except ImportError as error:
        package = {"hf": "huggingface_hub", "s3": "s3fs"}[scheme]
        raise UserError(f"{scheme}:// sources need another package: pip install {package}") from error
    return fsspec.filesystem("file")


async def _any_client(**settings: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), **settings)


async def _guarded_client(**settings: Any) -> aiohttp.ClientSession:
    return await _any_client(connector=aiohttp.TCPConnector(socket_factory=_public_socket), **settings)


def _public_socket(address: Any) -> socket.socket:
    """A socket for the address a connection is about to be made to, whichever way its host's name resolved."""
    family, kind, protocol, _, target = address
    if not is_public(str(target[0])):
        raise PermissionError(errno.EACCES, f"{target[0]} is no public address")
    return socket.socket(family, kind, protocol)
