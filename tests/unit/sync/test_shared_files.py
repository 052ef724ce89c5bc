"""Files that processes share: who holds one, and that their bytes have a place."""

import os

import pytest

from sync.shared_files import reserve, try_lock


@pytest.fixture
def file(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        yield file


def test_one_holds_a_file_alone_or_several_share_it(file):
    with open(file.name, "rb") as other:
        assert try_lock(file.fileno()) and not try_lock(other.fileno())
        assert not try_lock(other.fileno(), shared=True)
    with open(file.name, "rb") as other, open(file.name, "rb") as third:
        file.close()
        assert try_lock(other.fileno(), shared=True) and try_lock(third.fileno(), shared=True)


@pytest.mark.parametrize("system_call", [True, False])
def test_a_file_grows_to_its_size_and_keeps_what_it_holds(file, monkeypatch, system_call):
    if not system_call:
        monkeypatch.delattr(os, "posix_fallocate")
    os.pwrite(file.fileno(), b"held", 0)
    for size in (0, 4, (1 << 20) + 7, 5):
        reserve(file.fileno(), size)
    content = file.read()
    assert content == b"held" + bytes((1 << 20) + 3)
    assert os.fstat(file.fileno()).st_blocks * 512 >= len(content)


def test_without_the_system_call_a_full_disk_is_told_at_once(file, monkeypatch):
    def full(file, content, start):
        raise OSError(28, "No space left on device")

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        reserve(file.fileno(), 10)
