"""Faults of a directory of blocks: each is a miss, a counter, and one line of the log."""

import errno
import logging
import os
import shutil

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.kv import directory as module
from tests.unit.kv.blocks import LAYOUT, data, file_of, key, real_bytes


@pytest.fixture
def disk(connect, tmp_path):
    return connect(f"disk:{tmp_path / 'kv'}")


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def save(connector, *numbers):
    for number in numbers:
        connector.save(key(number), data(number))
    assert connector.wait_until_written(60)


@pytest.mark.parametrize("fetched", [False, True])
def test_damaged_blocks_are_misses_with_one_line_and_are_stored_anew(disk, tmp_path, caplog, fetched):
    save(disk, 0, 1, 2)
    for number in (0, 1):
        path = file_of(tmp_path / "kv", number)
        path.write_bytes(path.read_bytes()[:-1])
    if fetched:
        assert disk.fetch([key(number) for number in range(3)])(60)
    loaded = [disk.load(key(number)) for number in range(3)]
    assert loaded == [None, None, data(2)]
    assert not disk.holds(key(0))
    (line,) = lines(caplog)
    assert f"block {key(0).hex()} is damaged: its header states 4096 bytes, 4095 follow" in line
    assert disk.stats().num_refused == 2
    save(disk, 0, 1)
    assert disk.load(key(0)) == data(0) and disk.stats().num_refused == 2


@pytest.mark.parametrize("kind", ["symbolic link", "names (hard links)", "others may write"])
def test_foreign_files_in_the_place_of_blocks_are_misses_with_one_line_and_give_way(disk, tmp_path, caplog, kind):
    save(disk, 0, 1, 2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(file_of(tmp_path / "kv", 2).read_bytes())
    for number in (0, 1):
        path = file_of(tmp_path / "kv", number)
        if kind == "others may write":
            path.chmod(0o622)
        else:
            path.unlink()
            path.symlink_to(elsewhere) if kind == "symbolic link" else path.hardlink_to(elsewhere)
    assert [disk.load(key(number)) for number in range(3)] == [None, None, data(2)]
    (line,) = lines(caplog)
    assert "cannot be read: " in line and kind in line
    assert disk.stats().num_refused == 2
    assert [disk.holds(key(number)) for number in range(3)] == [False, False, True]
    save(disk, 0, 1)
    assert [disk.load(key(number)) for number in range(3)] == [data(0), data(1), data(2)]
    assert disk.stats().num_refused == 2 and elsewhere.stat().st_nlink == 1
    disk._blocks._count_again()
    assert len(set(real_bytes(disk._blocks))) == 1


def test_a_link_that_is_removed_takes_nothing_off_the_account(disk, tmp_path):
    save(disk, 0, 1)
    file_of(tmp_path / "kv", 0).unlink()
    file_of(tmp_path / "kv", 0).symlink_to("x" * 200)
    before = disk.stats().num_bytes
    disk.drop([key(0)])
    assert disk.wait_until_written(60)
    assert not file_of(tmp_path / "kv", 0).is_symlink() and disk.stats().num_bytes == before


def test_a_full_disk_drops_blocks_with_one_line(disk, caplog, monkeypatch):
    save(disk, 0)
    real = os.pwrite

    def pwrite(file, content, start):
        if len(content) == 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, content, start)

    monkeypatch.setattr(os, "pwrite", pwrite)
    save(disk, 1, 2, 3)
    (line,) = lines(caplog)
    assert "a block could not be written and is dropped: No space left on device" in line
    assert disk.stats().num_dropped == 3
    assert [disk.load(key(number)) for number in range(4)] == [data(0), None, None, None]
    monkeypatch.undo()
    save(disk, 1)
    assert disk.load(key(1)) == data(1)


def test_a_disk_that_fails_while_it_is_read_is_a_miss(disk, caplog, monkeypatch):
    save(disk, 0)

    def preadv(file, buffers, start):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    assert disk.load(key(0)) is None
    monkeypatch.undo()
    assert disk.load(key(0)) == data(0)
    assert "cannot be read: Input/output error" in lines(caplog)[0]


@pytest.mark.parametrize("how", ["removed", "moved away", "emptied", "without its namespace"])
def test_a_directory_that_goes_while_it_is_used_is_made_again_by_the_next_save(disk, tmp_path, caplog, connect, how):
    save(disk, 0)
    path = tmp_path / "kv"
    if how == "moved away":
        path.rename(tmp_path / "away")
        assert disk.load(key(0)) == data(0)  # by the descriptor that is open
        shutil.rmtree(tmp_path / "away")
    elif how == "removed":
        shutil.rmtree(path)
    for entry in [] if not path.exists() else [path / LAYOUT.namespace] if "name" in how else list(path.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert disk.load(key(0)) is None
    other = connect(f"disk:{path}")
    save(other, 2)
    save(disk, 0, 1)
    assert [disk.load(key(number)) for number in range(3)] == [data(number) for number in range(3)]
    assert other.load(key(1)) == data(1) and other.stats().num_bytes == disk.stats().num_bytes
    assert not lines(caplog) and disk.stats().num_dropped == 0


def test_a_directory_that_cannot_be_made_again_costs_hits_alone(disk, tmp_path, caplog):
    save(disk, 0)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").symlink_to(tmp_path)
    save(disk, 0, 1)
    assert disk.load(key(0)) is None and disk.stats().num_dropped == 2
    assert len(lines(caplog)) == 1 and "dropped: it is a symbolic link" in lines(caplog)[0]
    (tmp_path / "kv").unlink()
    save(disk, 0)
    assert disk.load(key(0)) == data(0)


def test_a_queue_that_is_full_drops_blocks_and_counts_them(disk, monkeypatch):
    assert disk._queue._max_bytes == 256 << 20
    disk._queue._max_bytes = 4096
    real = disk._blocks.write
    disk.save(key(0), data(0))
    with disk._blocks._account.hold():  # the thread waits here
        for number in range(1, 5):
            disk.save(key(number), data(number))
    assert disk.wait_until_written(60)
    stats = disk.stats()
    assert stats.num_dropped >= 3 and stats.num_saved + stats.num_dropped == 5
    assert real == disk._blocks.write


def test_fetched_blocks_need_their_files_no_more(disk, tmp_path):
    save(disk, 0, 1)
    assert disk.fetch([key(0), key(1)])(60)
    file_of(tmp_path / "kv", 0).unlink()
    assert disk.load(key(0)) == data(0) and disk.load(key(0)) is None
    disk.fetch([key(1)])
    disk.drop([key(1)])
    assert disk.load(key(1)) is None
    assert disk.stats().fetch_seconds > 0


def test_the_end_of_a_fetched_chain_counts_as_used_before_its_beginning(disk, tmp_path):
    save(disk, 0, 1, 2)
    assert disk.fetch([key(0), key(1), key(2)])(60)
    times = [file_of(tmp_path / "kv", number).stat().st_mtime_ns for number in range(3)]
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize("make", ["link", "file", "open"])
def test_a_directory_that_is_not_this_users_alone_is_refused_at_the_start(connect, tmp_path, make):
    path = tmp_path / "kv"
    if make == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif make == "file":
        path.write_bytes(b"")
    else:
        path.mkdir()
        path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"kv_connector='disk:.*cannot be used: .*\. Give a directory that is"):
        connect(f"disk:{path}")


def test_a_directory_of_another_user_in_shared_memory_is_refused(connect, memory, monkeypatch):
    connect("shm").close()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    (memory / "rollout_kv_12345").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="belongs to user"):
        connect("shm")


def test_a_machine_without_shared_memory_is_told_what_to_use(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "absent")
    with pytest.raises(ConfigError, match="use 'host', or 'disk:DIRECTORY'"):
        connect("shm")


def test_engines_of_another_layout_are_reported_once(disk, caplog):
    same, other = {"namespace": LAYOUT.namespace}, {"namespace": "0"}
    disk.meet([same])
    assert not lines(caplog)
    disk.meet([other, same, other])
    assert len(lines(caplog)) == 1 and "another layout" in lines(caplog)[0]
