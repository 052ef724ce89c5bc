"""Files and directories that are this user's own are opened, all others refused in words, and nothing waits."""

import os
import socket
from contextlib import chdir

import pytest

from sync.own_files import OTHERS, make_directories, open_directory, open_file, open_regular, read_small


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def bind_socket(path):
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)


OTHER_KINDS = {
    "a named pipe": os.mkfifo,
    "a socket": bind_socket,
    "a symbolic link": lambda path: path.symlink_to("/dev/null"),
    "a directory": os.mkdir,
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
def test_what_is_no_file_is_refused_by_its_kind(tmp_path, kind, flags):
    OTHER_KINDS[kind](tmp_path / "x")
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        open_file(tmp_path / "x", flags)


@pytest.mark.parametrize("kind", ["a named pipe", "a directory"])
def test_what_a_link_leads_to_is_refused_by_its_kind(tmp_path, kind):
    OTHER_KINDS[kind](tmp_path / "x")
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        open_regular(tmp_path / "link")
    with pytest.raises(OSError, match="it is a device, not a regular file"):
        open_regular("/dev/zero")


def test_a_pipe_put_in_place_of_a_file_after_it_was_looked_at_is_refused(tmp_path, monkeypatch):
    """Between the look and the opening; nobody writes to the pipe, so that opening it plainly would wait."""
    path, look = tmp_path / "x", os.stat

    def stat_and_replace(*arguments, **options):
        status = look(*arguments, **options)
        path.unlink()
        os.mkfifo(path)
        return status

    for opens in (open_file, open_regular):
        path.unlink(missing_ok=True)
        path.write_bytes(b"")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="it is a named pipe"):
            patch.setattr(os, "stat", stat_and_replace)
            opens(path)


def test_a_file_is_made_for_this_user_alone(tmp_path, no_umask):
    os.close(open_file(tmp_path / "x", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_foreign_open_and_doubly_named_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"content")
    path.chmod(0o620)
    with pytest.raises(OSError, match="others may write to it .mode 0620; chmod go-w mends that"):
        open_file(path)
    path.chmod(0o644)
    assert read_small(path, 7) == b"content"
    with pytest.raises(OSError, match="it has 7 bytes; at most 6 are read"):
        read_small(path, 6)
    os.link(path, tmp_path / "y")
    with pytest.raises(OSError, match="it has 2 names"):
        open_file(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    for opens in (open_file, open_directory):
        with pytest.raises(OSError, match="belongs to user .*, this process to user 12345"):
            opens(path if opens is open_file else tmp_path)


def test_every_ancestor_that_is_made_is_this_users_alone(tmp_path, no_umask):
    make_directories(tmp_path / "a" / "b" / "c")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")} == {0o700}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_an_ancestor_that_somebody_else_made_first_is_refused(tmp_path, monkeypatch):
    make = os.mkdir

    def be_second(path, mode):
        make(path, 0o777)
        os.chmod(path, 0o777)
        raise FileExistsError(17, "File exists", path)

    monkeypatch.setattr(os, "mkdir", be_second)
    with pytest.raises(OSError, match="others may write to it .mode 0777"):
        make_directories(tmp_path / "a" / "b")


def test_a_link_in_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="it is a symbolic link, not a directory"):
        make_directories(tmp_path / "link")
    (tmp_path / "real").chmod(0o750)
    os.close(open_directory(tmp_path / "real"))
    with pytest.raises(OSError, match="others have rights to it .mode 0750; chmod 0700"):
        open_directory(tmp_path / "real", closed_to=OTHERS)
