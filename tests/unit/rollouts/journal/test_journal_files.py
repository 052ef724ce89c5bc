"""The directory of a journal: one writer, whole segments, and nothing that another program or crash has left."""

import os

import pytest

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.rollouts.journal import journal as module
from rollout_engine.rollouts.journal.frames import read_frames
from rollout_engine.rollouts.journal.journal import Head, JournalOptions, open_with


def open_journal(path, kind="collect", **options):
    """(journal, payloads of its records, heads)"""
    records, heads = [], []

    def take(location, record):
        (heads if isinstance(record, Head) else records).append(record)

    return open_with(JournalOptions(directory=str(path), **options), kind, take), records, heads


@pytest.fixture
def written(tmp_path):
    """A journal of three segments, closed: (directory, its records)."""
    journal, *_ = open_journal(tmp_path)
    journal.begin({"seed": 1}, {"at": 0})
    payloads = [bytes([i]) * (10 + i) for i in range(9)]
    for i, payload in enumerate(payloads):
        if i and i % 3 == 0:
            journal.begin({"seed": 1}, {"at": i})
        place = journal.append(payload)
        assert journal.read_record(place) == payload
    journal.close()
    return tmp_path, payloads


def segments(path):
    return sorted(path.glob("segment-*.log"))


def test_records_of_all_segments_return_in_order_and_more_follow_them(written):
    path, payloads = written
    journal, records, heads = open_journal(path)
    assert records == payloads and [head.identity for head in heads] == [{"seed": 1}] * 3
    journal.append(b"more")
    journal.sync()
    journal.close()
    assert open_journal(path)[1] == [*payloads, b"more"]


def test_the_last_segment_is_cut_at_any_byte_and_the_others_at_none(written, caplog):
    path, payloads = written
    for number, file in enumerate(segments(path)):
        data = file.read_bytes()
        frames = [*read_frames(data, number + 1)]
        head_end = frames[1].start
        for size in range(len(data)):
            file.write_bytes(data[:size])
            if number == 2 and size >= head_end:
                journal, records, _ = open_journal(path)
                journal.close()
                num_whole = 6 + sum(frame.start + 16 + len(frame.payload) <= size for frame in frames[1:])
                assert records == payloads[:num_whole]
            else:
                with pytest.raises(RequestError, match=r"journal as it was written.*segment-00000"):
                    open_journal(path)
        file.write_bytes(data)
    assert "was cut short by a crash" in caplog.text
    assert open_journal(path)[1] == payloads


def test_an_altered_byte_in_any_segment_is_refused_with_its_place(written):
    path, _ = written
    for file in segments(path):
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 3):
            data[place] ^= 4
            file.write_bytes(data)
            with pytest.raises(RequestError, match=f"{file.name}: "):
                open_journal(path)
            data[place] ^= 4
        file.write_bytes(data)


def test_a_segment_that_is_missing_or_from_another_journal_is_refused(written, tmp_path_factory):
    path, _ = written
    other, *_ = open_journal(tmp_path_factory.mktemp("other"))
    other.begin({"seed": 1}, {"at": 0})
    other.append(b"another")
    other.close()
    _, second, _ = segments(path)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(RequestError, match=r"segments are missing: there are \[1, 3\]"):
        open_journal(path)
    second.write_bytes(segments(path)[0].read_bytes())
    with pytest.raises(RequestError, match="does not match its checksum"):
        open_journal(path)
    second.write_bytes(content)
    [only] = segments(other._directory)
    segments(path)[0].write_bytes(only.read_bytes())
    with pytest.raises(RequestError, match="is not as it was when the next segment began"):
        open_journal(path)


def test_there_is_one_writer(written):
    path, _ = written
    journal, *_ = open_journal(path)
    with pytest.raises(RequestError, match="Another collector writes to it"):
        open_journal(path)
    journal.close()
    journal.close()
    open_journal(path)[0].close()
    with pytest.raises(LifecycleError, match="is closed: open it again"):
        journal.append(b"late")


def test_other_kinds_versions_and_programs_are_refused(written, monkeypatch, tmp_path_factory):
    path, _ = written
    with pytest.raises(RequestError, match="the journal of a rollout.*It is that of a collect"):
        open_journal(path, kind="rollout")
    newer = tmp_path_factory.mktemp("newer")
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT", 2)
        journal, *_ = open_journal(newer)
        journal.begin({}, {})
        journal.close()
    with pytest.raises(RequestError, match="its form is 2, and this version reads up to 1"):
        open_journal(newer)
    segments(newer)[0].write_bytes(b"hello, world\n" * 10)
    with pytest.raises(RequestError, match="another program wrote it"):
        open_journal(newer)
    file = path / "a file"
    file.write_text("text")
    with pytest.raises(RequestError, match="a directory to read and write"):
        open_journal(file)


def test_a_segment_without_its_name_never_began(written):
    path, payloads = written
    (path / "segment-000004.new").write_bytes(b"half a he")
    journal, records, _ = open_journal(path)
    assert records == payloads and journal.segments == [1, 2, 3]
    journal.begin({"seed": 1}, {})
    assert journal.segments == [1, 2, 3, 4]
    journal.close()


def test_old_segments_are_removed_and_the_newest_full_ones_kept(written):
    path, payloads = written
    journal, *_ = open_journal(path, keep_segments=1)
    journal.remove_before(1)
    assert journal.segments == [1, 2, 3]
    journal.remove_before(3)
    assert journal.segments == [2, 3]
    journal.close()
    assert open_journal(path)[1] == payloads[3:]


def test_a_disk_without_room_ends_the_journal_and_what_was_whole_stays(written, monkeypatch):
    path, payloads = written
    journal, *_ = open_journal(path)

    def write_half(descriptor, data):
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", write_half)
        with pytest.raises(RequestError, match="No space left on device"):
            journal.append(b"much")
    with pytest.raises(LifecycleError, match="closed"):
        journal.append(b"more")
    assert open_journal(path)[1] == payloads


@pytest.mark.parametrize("wrong", [3, "", ["a"], JournalOptions(directory="x", segment_bytes=1)])
def test_what_names_no_directory_is_refused(wrong):
    with pytest.raises(RequestError, match="journal"):
        JournalOptions.of(wrong)
