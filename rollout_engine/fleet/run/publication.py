"""The newest weights of one model, readable by every replica of a fleet: the policy's, or the draft model's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rollout_engine.base.errors import WeightUpdateError, as_weight_errors
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.store_directory import StoreDirectory
from rollout_engine.fleet.run.update_round import overlaid
from sync.base import Metadata, WeightSource
from sync.cast_notice import CastNotice
from sync.checkpoint_names import CheckpointNames
from sync.offer import check_source
from sync.published import is_store
from sync.source import read_source
from sync.store import StoreSender


class Published(NamedTuple):
    """The place of the newest weights: their path, version and digest."""

    path: str
    version: int
    digest: str
    """`UpdateReport.digest`: weights that are read there later must have the same."""


class Publication:
    """Publishes tensors in shared memory, leaves a user's path as it is, and has replicas read either."""

    def __init__(self, *, draft: bool = False) -> None:
        """`draft`: these are the draft model's weights."""
        self.newest: Published | None = None
        """The weights that a replica has committed last."""
        self._draft = draft
        self._cast_notice = CastNotice()
        self._directory: StoreDirectory | None = None
        self._sender: StoreSender | None = None

    @property
    def directory(self) -> Path | None:
        """Directory of published tensors; None before the first."""
        return None if self._directory is None else self._directory.path

    def live_version(self, member: Member) -> int:
        """Version of the newest weights; of those that a replica has, before there was an update."""
        if self.newest is not None:
            return self.newest.version
        return self._live_weights(member)[0]

    def publish(
        self, member: Member, source: WeightSource, version: int | None, live_version: int
    ) -> tuple[str, int | None]:
        """Publish tensors, or take a user's path; returns path and version. `member`: it has the names and dtypes."""
        if isinstance(source, str | os.PathLike):
            path = os.path.abspath(os.path.expanduser(source))
            if version is None and not is_store(Path(path)):  # a store has a version of its own
                version = live_version + 1
            return path, version
        _, metadata, names = self._live_weights(member)
        version = live_version + 1 if version is None else version
        with as_weight_errors():
            if self._directory is None or self._sender is None:
                self._directory = StoreDirectory()
                self._sender = StoreSender(self._directory.path, reset_version=True)
            pairs = names.used(read_source(source), metadata)
            check_source(pairs, metadata)
            self._cast_notice.warn_if_cast(pairs, metadata)
            self._sender.offer(pairs, version, metadata)
        return str(self._directory.path), version

    def take_back(self, path: str) -> None:
        """Unpublish weights that no replica has committed."""
        if self._sender is not None and self._is_own(path):
            self._sender.take_back()

    def complete_source(self, member: Member, part: WeightSource) -> WeightSource:
        """All of the newest weights, those of `part` in their place: a replica that starts later needs all of them.

        `member`: a replica, which has the names. Raises `WeightUpdateError` if the other weights cannot be read here.
        """
        newest = self.newest
        if isinstance(part, str | os.PathLike) or newest is None or not self._is_own(newest.path):
            what = "update_weights(partial=True): the replicas of a fleet get the rest from the update before"
            advice = "first send all weights once, as an nn.Module or as tensors, then parts, as tensors too"
            raise WeightUpdateError(f"{what}, if both have come as tensors and not as a path: {advice}.")
        _, metadata, names = self._live_weights(member)
        with as_weight_errors():
            return overlaid(newest.path, names.used(read_source(part), metadata))

    def stage(self, member: Member, path: str, version: int | None, options: UpdateOptions) -> tuple[int, str]:
        """Have a replica stage the weights at a path; returns their version and digest."""
        with self._near(member, path, options.timeout) as path:
            return member.client.stage_weights(path, version, options)

    def give(self, member: Member, newest: Published) -> None:
        """Give a replica that missed them, and whose `updating` is held, the newest weights.

        Raises as `EngineClient.update_weights`; the replica has its old weights then.
        """
        client, options = member.client, UpdateOptions(reset_version=True, draft=self._draft)
        try:
            if self.stage(member, newest.path, newest.version, options) != (newest.version, newest.digest):
                raise _make_changed_error(newest)
            client.commit_weights(options.timeout)
        except BaseException:
            client.drop_staged_weights()
            raise

    def close(self) -> None:
        """Remove the published weights."""
        if self._sender is not None and self._directory is not None:
            self._sender.close()
            self._directory.remove()

    def _live_weights(self, member: Member) -> tuple[int, Metadata, CheckpointNames]:
        """Version, metadata and further names of a replica's weights."""
        found: tuple[int, Metadata, CheckpointNames] = member.client.call(
            "get_live_weights", {"draft": self._draft}
        ).result()
        return found

    def _is_own(self, path: str) -> bool:
        return self._directory is not None and path == str(self._directory.path)

    @contextmanager
    def _near(self, member: Member, path: str, seconds: float) -> Iterator[str]:
        """Path at which a replica reads the weights: our publication near it, a user's path on its own node.

        Errors of a user's path name the node that read it.
        """
        if self._is_own(path):
            yield member.replica.near(path, seconds)
            return
        try:
            yield path
        except WeightUpdateError as problem:
            raise type(problem)(f"On node {member.replica.node}: {problem}") from problem


def _make_changed_error(published: Published) -> WeightUpdateError:
    what = f"{published.path} holds other weights than those of version {published.version} that another replica read"
    return WeightUpdateError(f"{what}: leave them there as long as the fleet serves them, or update it again.")
