"""Files that are replaced whole, or not at all."""

import os
import stat

import pytest

from rollout_engine.base.whole_files import whole_file


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    with whole_file(path) as file:
        file.write(b"new, and longer")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new, and longer" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_that_open_gives(tmp_path):
    (tmp_path / "plain").write_text("")
    with whole_file(tmp_path / "file") as file:
        file.write(b"a")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_changes_if_the_block_raises(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing/file'$"), whole_file(tmp_path / "missing" / "file"):
        raise AssertionError("there is no file to write")


def test_a_link_stays_one_and_a_device_is_written_in_place(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path / "link", "/dev/null"):
        with whole_file(path) as file:
            file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    with pytest.raises(OSError, match="No space"), whole_file("/dev/full") as file:
        file.write(b"new")
