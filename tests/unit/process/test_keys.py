"""The file of keys: for its user alone, never written over, and refused in words where it is anything else."""

import os
import stat

import msgspec
import pytest
import zmq

from rollout_engine.base.errors import ConfigError
from rollout_engine.process.keys import Keys, public_key


def test_a_file_is_made_once_for_its_user_alone_and_gives_the_same_keys_again(tmp_path):
    path = tmp_path / "keys"
    made = Keys.read_or_write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.read(path) == Keys.read_or_write(path) == made != Keys.make()
    assert public_key(made.server) == zmq.curve_public(made.server.encode()) != public_key(made.client)
    with pytest.raises(ConfigError, match=r"key_file='.*keys' cannot be made: File exists"):
        Keys.write(path)
    assert Keys.read(path) == made


def test_no_secret_is_shown():
    keys = Keys.make()
    assert keys.server not in f"{keys!r} {keys}" and keys.client not in f"{keys!r} {keys}"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_a_file_to_which_others_have_rights_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    Keys.write(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others .*mode {mode:04o}.*chmod"):
        Keys.read(path)
    with pytest.raises(ConfigError, match="others"):
        Keys.read_or_write(path)


def test_only_a_regular_file_is_read_and_none_is_made_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in {"link": "a symbolic link", "pipe": "a named pipe", ".": "a directory"}.items():
        for get in (Keys.read, Keys.read_or_write):
            with pytest.raises(ConfigError, match=f"it is {kind}, not a regular file"):
                get(tmp_path / name)
    with pytest.raises(ConfigError):
        Keys.write(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="does not exist: copy the one that was given to the core"):
        Keys.read(tmp_path / "nothing")


def test_what_holds_no_keys_is_refused_without_showing_it(tmp_path):
    path, keys = tmp_path / "keys", Keys.make()
    Keys.write(path)
    good = msgspec.to_builtins(keys)
    for data in (
        b"",
        b"\xff\xfe",
        b"[]",
        msgspec.json.encode({"server": keys.server}),
        msgspec.json.encode(good | {"other": 1}),
        msgspec.json.encode(good | {"client": keys.client[1:]}),
        msgspec.json.encode(good | {"client": "\\" * 40}),
        msgspec.json.encode(good | {"client": "é" * 40}),
        msgspec.json.encode(good) + b" " * 5000 + b"x",
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="is no file of keys") as caught:
            Keys.read(path)
        assert keys.server not in str(caught.value)
