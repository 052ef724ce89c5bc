"""Which URLs of pictures a server follows, and to which addresses."""

import ipaddress

import pytest

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.serve.media.hosts import AllowedHosts

FIELD = "messages[0]['content'][1]['image_url']['url']"
HOSTS = AllowedHosts(["images.example.org", "other.example:8443", "10.0.0.7", "[fd00::7]:9000", "192.168.0.0/16"])


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://images.example.org/a.png", ("https", "images.example.org", 443, "/a.png")),
        ("HTTP://IMAGES.example.org.", ("http", "images.example.org", 80, "/")),
        ("http://images.example.org:443/a?b=c#d", ("http", "images.example.org", 443, "/a?b=c")),
        ("https://other.example:8443/a", ("https", "other.example", 8443, "/a")),
        ("http://10.0.0.7/a", ("http", "10.0.0.7", 80, "/a")),
        ("http://[fd00:0::7]:9000/a", ("http", "fd00::7", 9000, "/a")),
    ],
)
def test_a_url_of_an_allowed_host_is_followed(url, target):
    assert HOSTS.target(url, FIELD) == target


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "https://evil.images.example.org/a.png",
        "https://images.example.org.evil/a.png",
        "https://images.example.org:8443/a.png",
        "https://other.example/a.png",
        "https://images.example.org@evil/a.png",
        "https://evil/@images.example.org",
        "https://user:word@images.example.org/a.png",
        "https://@images.example.org/a.png",
        "https://images.example.org\\@evil/a.png",
        "https://evil\\.images.example.org/a.png",
        "https://images.example.org%2eevil/a.png",
        "https://images.example.org%00.evil/",
        "https://images.example.org\t/a.png",
        "https://images.example.org/a\r\nHost: evil",
        " https://images.example.org/a.png",
        "https://images.exａmple.org/a.png",
        "https:///a.png",
        "https:images.example.org",
        "https://images.example.org:port/",
        "https://images.example.org:0/",
        "https://images.example.org:99999/",
        "http://127.0.0.1/",
        "http://localhost/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://[::1]/",
        "http://[::ffff:10.0.0.7]/",
        "http://[fe80::1%25eth0]/",
        "http://[images.example.org]/",
        "http://192.168.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "gopher://images.example.org/",
        "https://images.example.org/" + "a" * 9000,
    ],
)
def test_any_other_url_is_refused_by_the_name_of_its_part(url):
    with pytest.raises(RequestError) as refusal:
        HOSTS.target(url, FIELD)
    assert refusal.value.field == FIELD and str(refusal.value).startswith(FIELD) and len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("address", "is_permitted"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("10.0.0.7", True),
        ("192.168.3.4", True),
        ("fd00::7", True),
        ("10.0.0.8", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("172.17.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("::127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:7f00:1::", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
    ],
)
def test_a_name_leads_to_public_and_to_listed_addresses_alone(address, is_permitted):
    assert HOSTS.permits(ipaddress.ip_address(address)) is is_permitted


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.example.org", "https://example.org", "example.org/path", "a b", "user@example.org", "example.org:",
     "example.org:http", "2130706433", "0x7f.1", "127.1", "10.0.0.1/8", "[::1", "exämple.org"],
)  # fmt: skip
def test_an_entry_that_is_no_host_is_refused_when_the_server_is_made(entry):
    with pytest.raises(ConfigError, match="allow_media="):
        AllowedHosts([entry])
