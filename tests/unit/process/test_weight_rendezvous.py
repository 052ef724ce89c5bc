"""Where a client's weights meet its core: a directory nobody can take first, refused where it is not this user's."""

import os
from concurrent.futures import Future

import pytest
import torch

from rollout_engine.base.errors import ManifestMismatchError, WeightUpdateError
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.process import weight_rendezvous
from rollout_engine.process.weight_client import WeightClient
from rollout_engine.process.weight_rendezvous import Rendezvous, make_directory, remove_directories
from sync.checkpoint_names import CheckpointNames

METADATA = {"w": ("float32", (4,))}


@pytest.fixture
def core(tmp_path, monkeypatch):
    """The directory of a core, beside shared memory."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "rollout-engine-x").mkdir(mode=0o700)
    monkeypatch.setattr(weight_rendezvous, "SHARED_MEMORY", str(tmp_path / "memory"))
    return tmp_path / "rollout-engine-x"


def test_a_name_taken_first_is_not_used(core, tmp_path):
    (tmp_path / "memory" / "rollout-engine-x-weights-0").symlink_to(tmp_path)
    directory, lock = make_directory(str(core), 0, METADATA)
    os.close(lock)
    assert os.lstat(directory).st_mode & 0o170777 == 0o040700
    assert not (tmp_path / "lock").exists(), "nothing was made where the link leads"
    other, lock = make_directory(str(core), 0, METADATA)
    os.close(lock)
    assert other != directory


def test_the_directories_of_a_client_are_removed_and_no_others(core, tmp_path):
    for index in (1, 1, 10):
        os.close(make_directory(str(core), index, METADATA)[1])
    (tmp_path / "memory" / "rollout-engine-x-weights-1-link").symlink_to(core)
    remove_directories(str(core), 1)
    left = sorted(path.name for path in (tmp_path / "memory").iterdir())
    assert left[0] == "rollout-engine-x-weights-1-link" and left[1].startswith("rollout-engine-x-weights-10-")
    remove_directories(str(core))
    assert len(list((tmp_path / "memory").iterdir())) == 1 and core.exists()


@pytest.mark.parametrize("transport", ["shm", "store", "gloo"])
def test_a_core_receives_only_in_a_directory_of_this_user_alone(tmp_path, transport):
    tmp_path.chmod(0o711)
    with pytest.raises(WeightUpdateError, match="Weights cannot be received in .* others have rights to it .mode 0711"):
        Rendezvous(transport, str(tmp_path), 1.0).make_receiver()
    with pytest.raises(WeightUpdateError, match="Weights cannot be received in '/dev/null': it is a device"):
        Rendezvous(transport, "/dev/null", 1.0).make_receiver()
    with pytest.raises(WeightUpdateError, match="Weights cannot be received in .*null"):
        Rendezvous(transport, "a\0b", 1.0).make_receiver()


class Caller:
    """A client of a core that has one weight, and the names of the verbs that it was asked for."""

    index, address = 0, "/nowhere"

    def __init__(self):
        self.called = []

    def call(self, name, arguments):
        self.called.append(name)
        answer = Future()
        answer.set_result((1, METADATA, CheckpointNames()))
        return answer


BAD_SOURCES = {
    "a name that the engine does not have": ({"v": torch.ones(4)}, "1 name is not in the model: v"),
    "a tensor larger than the engine's": ({"w": torch.ones(5)}, "'w': expected .*4.*, came .*5"),
    "a name twice": ([("w", torch.ones(4))] * 2, "The source lists w more than once"),
    "a tensor of nine dimensions": ({"w": torch.ones([1] * 9)}, "1 tensor does not fit"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_source_that_does_not_fit_is_refused_before_the_core_hears_of_it(core, name):
    source, message = BAD_SOURCES[name]
    caller = Caller()
    caller.address = str(core)
    client = WeightClient(caller)
    with pytest.raises(ManifestMismatchError, match=message):
        client.push_to_core(source, None, UpdateOptions())
    client.close()
    assert caller.called == ["get_live_weights"]
