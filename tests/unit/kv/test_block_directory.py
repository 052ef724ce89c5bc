"""Files of blocks: whole or absent, within the bound, and this user's own."""

import errno
import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.kv.block_directory import NoRoom
from rollout_engine.kv.block_frame import HEADER_BYTES, DamagedBlock
from tests.forking import end_fork, start_fork
from tests.unit.kv.blocks import data, file_of, key, open_blocks, real_bytes

FILE = HEADER_BYTES + 4096


def test_a_block_is_read_in_another_process_after_its_writer_has_closed(tmp_path, opened):
    blocks = open_blocks(tmp_path / "kv")
    assert blocks.write(key(0), data(0)) and not blocks.write(key(0), data(0))
    blocks.close()
    for is_mapped in (False, True):
        other = opened(open_blocks(tmp_path / "kv", is_mapped=is_mapped))
        loaded = other.read(key(0), 5)
        assert loaded == data(0) and loaded.readonly
        assert file_of(tmp_path / "kv", 0).stat().st_mtime_ns == 5


@pytest.mark.parametrize("is_mapped", [False, True])
def test_bytes_that_were_read_stay_when_their_file_goes(tmp_path, is_mapped):
    blocks = open_blocks(tmp_path / "kv", is_mapped=is_mapped)
    blocks.write(key(0), data(0))
    loaded = blocks.read(key(0), 5)
    part = loaded[1000:]
    blocks.remove(key(0))
    blocks.close()
    assert loaded == data(0)
    del loaded
    assert part == data(0)[1000:]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_files_damaged_anywhere_are_refused(tmp_path, opened, is_mapped):
    blocks = opened(open_blocks(tmp_path / "kv", is_mapped=is_mapped))
    blocks.write(key(0), data(0))
    path = file_of(tmp_path / "kv", 0)
    whole = path.read_bytes()
    for place in (*range(HEADER_BYTES), *range(HEADER_BYTES, FILE, 411), FILE - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DamagedBlock):
            blocks.read(key(0), 5)
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedBlock):
            blocks.read(key(0), 5)
    path.write_bytes(whole)
    assert blocks.read(key(0), 5) == data(0)


def test_a_block_in_the_place_of_another_is_refused(tmp_path, blocks):
    blocks.write(key(0), data(0))
    blocks.write(key(1), data(1))
    os.replace(file_of(tmp_path / "kv", 0), file_of(tmp_path / "kv", 1))
    with pytest.raises(DamagedBlock, match="another one"):
        blocks.read(key(1), 5)


def test_links_pipes_and_files_of_others_are_neither_read_nor_written_to_and_give_way(tmp_path, blocks, monkeypatch):
    blocks.write(key(0), data(0))
    path, elsewhere = file_of(tmp_path / "kv", 0), tmp_path / "elsewhere"
    content = path.read_bytes()
    elsewhere.write_bytes(content)
    for make, words in (
        (lambda: path.symlink_to(elsewhere), "symbolic link"),
        (lambda: os.mkfifo(path), "named pipe"),
        (lambda: os.link(elsewhere, path), "2 names"),
        (lambda: path.mkdir(), "a directory"),
    ):
        path.unlink()
        make()
        with pytest.raises(OSError, match=words):
            blocks.read(key(0), 5)
        assert not blocks.has(key(0))
        if path.is_dir():
            with pytest.raises(IsADirectoryError):
                blocks.write(key(0), data(1))
            path.rmdir()
        assert blocks.write(key(0), data(1)) and blocks.read(key(0), 5) == data(1)
    assert elsewhere.read_bytes() == content
    path.chmod(0o666)
    with pytest.raises(OSError, match="may write"):
        blocks.read(key(0), 5)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(OSError, match="belongs to user"):
        blocks.read(key(0), 5)


def test_a_folder_that_is_a_link_is_refused(tmp_path, blocks):
    folder = file_of(tmp_path / "kv", 0).parent
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    for use in (lambda: blocks.write(key(0), data(0)), lambda: blocks.read(key(0), 5)):
        with pytest.raises(OSError, match="symbolic link"):
            use()
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("make", ["link", "file", "open", "foreign"])
def test_a_directory_that_is_not_this_users_alone_is_refused(tmp_path, monkeypatch, make):
    path = tmp_path / "kv"
    match make:
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            path.symlink_to(tmp_path / "elsewhere")
        case "file":
            path.write_bytes(b"")
        case "open":
            path.mkdir()
            path.chmod(0o755)
        case "foreign":
            path.mkdir(mode=0o700)
            monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(OSError, match="symbolic link|regular file|have rights|belongs to"):
        open_blocks(path)


@settings(max_examples=40)
@given(
    st.integers(3 * FILE, 8 * FILE),
    st.lists(st.tuples(st.sampled_from("wwwrx"), st.integers(0, 9), st.booleans()), max_size=40),
)
def test_any_order_of_calls_keeps_the_bound_and_the_account(tmp_path_factory, max_bytes, actions):
    path = tmp_path_factory.mktemp("bound") / "kv"
    both = [open_blocks(path, max_bytes), open_blocks(path, max_bytes, namespace="ab" * 16)]
    for action, number, other in actions:
        blocks = both[other]
        if action == "w":
            assert blocks.write(key(number), data(number, 4096 - 100 * number)) or blocks.has(key(number))
            assert blocks.has(key(number))
        elif action == "x":
            blocks.remove(key(number))
            assert not blocks.has(key(number))
        elif blocks.has(key(number)):
            assert blocks.read(key(number), 5) == data(number, 4096 - 100 * number)
        found, stated = real_bytes(blocks)
        assert found == stated <= max_bytes
    for blocks in both:
        blocks.close()


def test_blocks_that_were_not_used_for_the_longest_time_leave_first(tmp_path, opened):
    blocks = opened(open_blocks(tmp_path / "kv", 4 * FILE))
    for number in range(4):
        blocks.write(key(number), data(number))
        os.utime(file_of(tmp_path / "kv", number), ns=(number, number))
    blocks.read(key(0), 10)
    blocks.write(key(4), data(4))
    assert [number for number in range(5) if blocks.has(key(number))] == [0, 2, 3, 4]
    assert blocks.num_evicted == 1


def test_a_block_above_the_bound_has_no_room_and_evicts_nothing(tmp_path, opened):
    blocks = opened(open_blocks(tmp_path / "kv", 2 * FILE))
    blocks.write(key(0), data(0))
    with pytest.raises(NoRoom, match="no room within the bound"):
        blocks.write(key(1), data(1, 3 * FILE))
    assert blocks.has(key(0))


@pytest.mark.parametrize("call", ["open", "ftruncate", "pwrite", "rename"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, blocks, monkeypatch, call):
    blocks.write(key(9), data(9))
    account = blocks.account()
    real = getattr(os, call)

    def fail(*args, **kwargs):
        name = args[0]
        is_block = call != "open" or (isinstance(name, str) and "/." in name)
        # The account's own small writes succeed: their file is there already.
        if is_block and not (call == "pwrite" and len(args[1]) < HEADER_BYTES):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, fail)
    blocks._make_folder(key(0).hex()[:2])
    with pytest.raises(OSError, match="No space left"):
        blocks.write(key(0), data(0))
    monkeypatch.undo()
    assert real_bytes(blocks) == (account.num_bytes, account.num_bytes)
    assert blocks.write(key(0), data(0)) and blocks.read(key(0), 5) == data(0)


def test_a_folder_that_was_removed_is_made_again(tmp_path, blocks):
    blocks.write(key(0), data(0))
    file_of(tmp_path / "kv", 0).unlink()
    file_of(tmp_path / "kv", 0).parent.rmdir()
    with pytest.raises(FileNotFoundError):
        blocks.write(key(0), data(0))
    assert blocks.write(key(0), data(0)) and blocks.read(key(0), 5) == data(0)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 48, bytes(48)])
def test_an_account_that_cannot_be_read_is_counted_again(tmp_path, opened, content):
    blocks = opened(open_blocks(tmp_path / "kv", 3 * FILE))
    for number in range(3):
        blocks.write(key(number), data(number))
    (tmp_path / "kv" / "account").write_bytes(content)
    assert blocks.write(key(3), data(3))
    assert real_bytes(blocks) == (3 * FILE, 3 * FILE)


def test_files_of_killed_writers_are_removed_and_those_of_living_ones_stay(tmp_path, opened):
    blocks = opened(open_blocks(tmp_path / "kv", 4 * FILE))
    blocks._make_folder("ab")
    left, _ = blocks._begin(f"ab/.{'0' * 62}.left", FILE)
    os.close(left)
    held, _ = blocks._begin(f"ab/.{'0' * 62}.held", FILE)
    for number in range(4):
        blocks.write(key(number), data(number))
    assert os.listdir(tmp_path / "kv" / blocks._namespace / "ab") == [f".{'0' * 62}.held"]
    found, stated = real_bytes(blocks)
    assert found == stated <= 4 * FILE
    os.close(held)


def test_one_of_two_writers_of_a_block_is_first(tmp_path, blocks, monkeypatch):
    real = os.pwrite
    other = open_blocks(tmp_path / "kv")

    def pwrite(file, content, start):
        if len(content) == 4096 and not other.has(key(0)):
            monkeypatch.undo()
            assert other.write(key(0), data(0))
        return real(file, content, start)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not blocks.write(key(0), data(0))
    other.close()
    assert real_bytes(blocks) == (FILE, FILE)


def test_two_processes_that_evict_at_once_keep_the_bound(tmp_path, opened):
    path, max_bytes = tmp_path / "kv", 6 * FILE
    blocks = opened(open_blocks(path, max_bytes))

    def write_all(start):
        mine = open_blocks(path, max_bytes)
        for number in range(start, start + 60):
            with suppress(NoRoom):  # the other process was faster each time
                mine.write(key(number), data(number))
            found, stated = real_bytes(mine)
            assert found <= min(stated, max_bytes), (found, stated)
        assert mine.num_evicted > 0
        mine.close()

    child = start_fork(lambda: write_all(1000))
    write_all(0)
    end_fork(child)
    found, stated = real_bytes(blocks)
    assert found <= min(stated, max_bytes)
    blocks._count_again()
    assert real_bytes(blocks) == (found, found)


def test_a_process_that_keeps_the_lock_is_waited_for_and_then_reported(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr("rollout_engine.kv.shared_account._LOCK_SECONDS", 0.01)
    other = open_blocks(tmp_path / "kv")
    with other._account.hold(), pytest.raises(TimeoutError, match="has held its lock"):
        blocks.write(key(0), data(0))
    assert blocks.write(key(0), data(0))
    other.close()


def test_a_bound_that_is_not_given_follows_from_the_free_space(tmp_path, opened, monkeypatch):
    monkeypatch.setattr("rollout_engine.kv.block_directory.free_memory", lambda: 1 << 20)
    assert opened(open_blocks(tmp_path / "memory", None, is_mapped=True)).max_bytes == 1 << 18
    disk = opened(open_blocks(tmp_path / "disk", None))
    assert 0 < disk.max_bytes <= 4 << 30
