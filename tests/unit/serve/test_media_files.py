"""Which files of the server's machine a request may name as pictures."""

import os
import threading

import pytest

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.serve.media.files import AllowedDirectories

FIELD, SECRET = "multi_modal_data['image'][0]", b"a secret"


@pytest.fixture
def place(tmp_path):
    """A directory that is allowed, beside one that is not."""
    for name in ("open/within", "closed", "open-too"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "closed" / "secret").write_bytes(SECRET)
    (tmp_path / "open-too" / "secret").write_bytes(SECRET)
    (tmp_path / "open" / "a b.png").write_bytes(b"picture")
    (tmp_path / "open" / "within" / "b.png").write_bytes(b"another")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed" / "secret")
    (tmp_path / "open" / "ways").symlink_to(tmp_path / "closed")
    os.mkfifo(tmp_path / "open" / "pipe")
    return tmp_path


def test_files_below_an_allowed_directory_are_read(place):
    (place / "alias").symlink_to(place / "open")
    allowed = AllowedDirectories([str(place / "alias")])
    for url, data in {
        f"file://{place}/open/a%20b.png": b"picture",
        f"FILE://localhost{place}/alias/a b.png/": b"picture",
        f"file://{place}/open//./within/b.png": b"another",
    }.items():
        assert allowed.read(url, FIELD, 100) == data
    assert len(allowed.read(f"file://{place}/open/a%20b.png", FIELD, 3)) == 4


@pytest.mark.parametrize(
    "path",
    [
        "/closed/secret",
        "/open/../closed/secret",
        "/open/within/../../closed/secret",
        "/open/%2e%2e/closed/secret",
        "/open/%2e%2e%2fclosed%2fsecret",
        "/open-too/secret",
        "/open/link",
        "/open/ways/secret",
        "/open/pipe",
        "/open/within",
        "/open/none",
        "/open",
        "/open/",
        "/open/a%20b.png%00",
        "/open/" + "a" * 5000,
    ],
)
def test_no_other_file_is_read(place, path):
    allowed, before = AllowedDirectories([str(place / "open")]), os.listdir("/proc/self/fd")
    with pytest.raises(RequestError) as refusal:
        allowed.read(f"file://{place}{path}", FIELD, 100)
    assert refusal.value.field == FIELD
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    "url", ["file://closed/secret", "file:secret", "file://", "file:///", "file://evil{place}/open/b"]
)
def test_a_url_of_another_host_or_without_a_path_is_refused(place, url):
    with pytest.raises(RequestError):
        AllowedDirectories([str(place / "open")]).read(url.format(place=place), FIELD, 100)


def test_a_file_that_is_exchanged_for_a_link_while_it_is_read_reveals_nothing(place):
    """An attacker who can write below the directory exchanges directories and links as fast as it can."""
    allowed, stop = AllowedDirectories([str(place / "open")]), threading.Event()
    url, real = f"file://{place}/open/turn/secret", place / "open" / "real"
    real.mkdir()
    (real / "secret").write_bytes(b"harmless")
    turn, link = place / "open" / "turn", place / "open" / "new"

    def exchange():
        while not stop.is_set():
            link.symlink_to(place / "closed")
            os.rename(link, turn)
            os.unlink(turn)
            os.rename(real, turn)
            os.rename(turn, real)

    thread = threading.Thread(target=exchange)
    thread.start()
    found = set()
    try:
        for _ in range(3000):
            try:
                found.add(allowed.read(url, FIELD, 100))
            except RequestError:
                found.add(None)
    finally:
        stop.set()
        thread.join()
    assert SECRET not in found


@pytest.mark.parametrize("directory", ["none", "open/a b.png"])
def test_only_a_directory_that_exists_can_be_allowed(place, directory):
    with pytest.raises(ConfigError, match="allow_media_dir="):
        AllowedDirectories([str(place / directory)])
