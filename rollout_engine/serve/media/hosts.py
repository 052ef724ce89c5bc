"""The hosts from which the server downloads, and the addresses to which their names may lead."""

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from rollout_engine.base.errors import ConfigError, RequestError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_SHOWN_CHARS = 100
"""Most characters of a refused URL that an error shows."""
_URL = re.compile(r"https?://[!-\[\]-~]+", re.IGNORECASE)
"""Printable ASCII without spaces and backslashes: parsers of URLs disagree about any other character."""
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.(?!-)[a-z0-9_-]{1,63})*")
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""Names that systems may read as an address, such as 2130706433 or 0x7f.1."""
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""Global unicast. Others may stand for addresses of IPv4, such as ::ffff:127.0.0.1 and 64:ff9b::7f00:1."""


class Target(NamedTuple):
    """The parts of a URL that may be requested."""

    scheme: str
    host: str
    """A name in lower case, or an address in its standard form."""
    port: int
    path: str
    """With the query; at least "/"."""

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the scheme's own, as the header `Host` has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


class AllowedHosts:
    """The hosts that URLs of requests may name.

    Args:
        entries: "images.example.org" at the ports 80 and 443; "images.example.org:8443" at this port; an address in
            place of a name; or a network, "10.0.0.0/8". A name may lead to public addresses, and to addresses and
            networks among the entries. Raises `ConfigError` for anything else.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._at_any: set[str] = set()
        """Hosts at the ports of the schemes."""
        self._at: set[tuple[str, int]] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in entries:
            self._add(entry)

    def target(self, url: str, field: str) -> Target:
        """The parts of an http(s) URL whose host is allowed. Raises `RequestError` naming the field."""
        if len(url) > _MAX_URL_CHARS or not _URL.fullmatch(url):
            bound = f"a URL of at most {_MAX_URL_CHARS} characters, printable ASCII without spaces and backslashes"
            raise RequestError.for_field(field, url[:_SHOWN_CHARS], bound)
        try:
            parts = urlsplit(url)
            host, port = _standard(parts.hostname or ""), parts.port
        except ValueError as problem:
            raise RequestError.for_field(field, url, f"a URL ({problem})") from None
        if "@" in parts.netloc:
            raise RequestError.for_field(field, f"a URL of {parts.hostname}", "a URL without a user name or password")
        port = DEFAULT_PORTS[parts.scheme] if port is None else port
        is_default = port in DEFAULT_PORTS.values() and host in self._at_any
        if not is_default and (host, port) not in self._at:
            place = f"{host}:{port}"
            hint = "Or start the server with --allow-media HOST or HOST:PORT."
            bound = "a data URL, or one of a host and port that this server was started with"
            raise RequestError.for_field(field, f"a URL of {place}", bound, hint)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return Target(parts.scheme, host, port, path)

    def permits(self, address: Address) -> bool:
        """Whether the server may connect to an address that an allowed name leads to."""
        if any(address in network for network in self._networks):
            return True
        if isinstance(address, ipaddress.IPv6Address):
            is_tunnel = address.sixtofour is not None or address.teredo is not None
            return address in _GLOBAL_V6 and address.is_global and not is_tunnel
        return address.is_global and not address.is_multicast

    def _add(self, entry: str) -> None:
        try:
            if "/" in entry:
                self._networks.append(ipaddress.ip_network(entry))
                return
            parts = urlsplit(f"//{entry}")
            host, port = _standard(parts.hostname or ""), parts.port
            address = _address(host)
            is_name = _NAME.fullmatch(host) is not None and not _NUMERIC.fullmatch(host)
            if (address is None and not is_name) or entry != parts.netloc or "@" in entry or entry.endswith(":"):
                raise ValueError("it is none")
        except ValueError as problem:
            bound = "a host, as images.example.org, images.example.org:8443, 10.0.0.7 or [fd00::7]:9000, or a network"
            text = f"allow_media={entry!r:.80} is not allowed: must be {bound}, as 10.0.0.0/8 ({problem})."
            raise ConfigError(f"{text} Give it without http://, a path or *.") from None
        if address is not None:
            self._networks.append(ipaddress.ip_network(address))
        if port is None:
            self._at_any.add(host)
        else:
            self._at.add((host, port))


def _standard(host: str) -> str:
    """A host in the one form that is compared; `urlsplit` has made it lower case."""
    host = host.removesuffix(".")
    address = _address(host)
    return host if address is None else str(address)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
