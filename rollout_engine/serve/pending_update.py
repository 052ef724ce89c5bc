"""The next weights, as they arrive over HTTP: gathered outside the engine, and committed whole or not at all."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from rollout_engine.base.errors import LifecycleError, ManifestMismatchError, RequestError, as_weight_errors
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import run_in_thread
from rollout_engine.engine import verbs
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.faces.verb_methods import awaitable
from rollout_engine.serve.plain_group import PlainGroup
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.request_log import logger
from sync.manifest import TensorSpec, check_distinct, counted, first_names

_MOST_TIMES = 2
"""Bytes that may gather, in times of the live weights: a float32 trainer of a bfloat16 engine sends twice as many."""
_get_missing_weights = awaitable(verbs.get_missing_weights)
_get_unused_names = awaitable(verbs.get_unused_names)
_NUMBER = re.compile(r"(?:weight_)?v?(\d{1,18})", re.ASCII)


class GroupFields(msgspec.Struct, kw_only=True):
    """How a trainer and this server find one another."""

    master_address: str
    master_port: int | str
    world_size: int
    rank_offset: int = 1
    backend: str = "gloo"
    group_name: str = "weights"
    timeout: float = 300.0
    """Seconds that the group has to form, and each tensor to arrive by it."""


class PendingUpdate:
    """One engine's door for weights. Everything is used on the event loop alone; one call at a time."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.group: PlainGroup | None = None
        """Brings tensors, once a trainer has asked for one."""
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = 0
        self._most_bytes = 0.0
        self._last: UpdateReport | None = None
        """Report of the last update that was committed here."""
        self._last_names: set[str] = set()
        """Names of its tensors, if they were a whole update and arrived as tensors, until another one begins."""
        self._is_reported = True
        """Whether no client may still end that update, to have its report."""
        self._is_receiving = False
        self.waits_for_end = False
        """Whether a client has begun an update, and will report its end."""
        self._version: int | None = None
        """Version that a client has given for the update that is begun, at its begin or with its tensors."""

    @property
    def is_begun(self) -> bool:
        """Whether tensors have arrived that are not committed."""
        return bool(self._tensors)

    async def missing(self) -> list[str]:
        """Names of the weights that the update lacks to be a whole one: tied weights count once."""
        return await self._missing_beside(self._tensors)

    async def have_arrived_late(self) -> bool:
        """Whether the tensors are further names of weights that the last update brought, as a tied head's is.

        A client that sends in several calls may bring these after the call that completed the update.
        """
        if not self._last_names or self._last is None or self._version not in (None, self._last.version):
            return False
        if not self._last_names.isdisjoint(self._tensors):
            return False
        return self._tensors.keys() <= (await self._engine.get_model_metadata()).keys()

    def begin(self, version: Any = None) -> None:
        """Drop the tensors of an update that was never finished. `version`: that of the one that begins."""
        number = as_version(version)
        if self._tensors:
            what = f"an update of {len(self._tensors)} tensors was begun and never finished"
            logger.warning("%s: they are dropped, since another one begins", what)
        self.drop()
        self.waits_for_end, self._version = True, number

    def drop(self) -> None:
        """Forget all tensors, and that the last update is still to be reported."""
        self._tensors, self._num_bytes, self._version = {}, 0, None
        self.waits_for_end, self._is_reported, self._last_names = False, True, set()

    def expect(self, version: Any) -> None:
        """Note the version of the tensors that follow. Raises `ManifestMismatchError` for parts of two updates.

        Without one, they are of the update that was begun.
        """
        given = as_version(version)
        if given is None and self.waits_for_end:
            return
        if given != self._version and (self._tensors or self._version is not None and self.waits_for_end):
            what = f"weight_version={given}, and the update that has begun with {len(self._tensors)} tensors"
            raise ManifestMismatchError(f"{what} has {self._version}: they are of two updates. Begin another one.")
        self._version = given

    def specs(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
        """The specs of tensors that a sender announces. Raises `RequestError` for columns of unequal lengths."""
        if not len(names) == len(dtypes) == len(shapes):
            columns = (names, "name"), (dtypes, "dtype"), (shapes, "shape")
            lengths = ", ".join(counted(column, word, f"{word}s") for column, word in columns)
            raise RequestError.for_field("names", lengths, "as many dtypes and shapes as names")
        dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
        return [TensorSpec(*each, "") for each in zip(names, map(tuple, shapes), dtypes, strict=True)]

    async def join(self, fields: GroupFields) -> str:
        """Form the group that brings tensors with a trainer. Tensors of an earlier trainer's update are dropped.

        Returns which rank this server is. Raises `HttpProblem` 501 for another backend than gloo, and as
        `PlainGroup.join`.
        """
        if fields.backend != "gloo":
            what = f"backend='{fields.backend:.40}' is not served over HTTP"
            raise HttpProblem(501, f"{what}: give 'gloo', or send a directory of weights.")
        if not str(fields.master_port).isdecimal() or not 0 < int(fields.master_port) < 65536:
            raise RequestError.for_field("master_port", fields.master_port, "a port, 1 to 65535")
        rank, world_size = fields.rank_offset, fields.world_size
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "name": fields.group_name}
        self.drop()
        self.group = None  # the former one's trainer may be gone, whether another one connects or not
        self.group = await run_in_thread(
            PlainGroup.join, fields.master_address, int(fields.master_port), **options, seconds=fields.timeout
        )
        return f"rank {rank} of {world_size} is ready"

    async def receive(self, specs: Sequence[TensorSpec]) -> None:
        """Take announced tensors from the group. Raises the weight errors; then no tensor that had arrived is kept."""
        group = self.group
        if group is None:
            raise LifecycleError("No group of this server and a trainer has been formed: call its init route first.")
        await self._check(specs)
        self._is_receiving = True
        try:
            await self._keep(await run_in_thread(lambda: list(group.receive(specs))))
        except BaseException:
            self.drop()
            self.group = None  # its ranks are at different broadcasts now
            raise
        finally:
            self._is_receiving = False

    async def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors that arrived in a body. Raises the weight errors, nothing taken."""
        pairs = list(tensors)
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in pairs]
        await self._check([TensorSpec(*each, "") for each in shapes])
        await self._keep(pairs)

    async def commit(self, version: Any = None, *, partial: bool = False) -> UpdateReport:
        """Have the engine take the tensors that have arrived, as `update_weights`, and forget them here.

        Raises the weight errors; the old weights serve on.
        """
        tensors = self._tensors
        self.drop()
        report = await self._engine.update_weights(tensors, version=as_version(version), partial=partial)
        self._last, self._is_reported = report, False
        self._last_names = set() if partial else set(tensors)
        return report

    async def commit_late(self) -> UpdateReport:
        """Have the engine compare late tensors with its weights, which are those of the last update already.

        Raises `StaleVersionError` if they differ.
        """
        assert self._last is not None, "an update precedes late tensors"
        if not self._tensors:  # the model uses none of those that have arrived
            return self._last
        names = self._last_names | self._tensors.keys()
        report = await self.commit(self._last.version, partial=True)
        self._last_names = names
        return report

    async def end(self, verb: str, version: Any) -> UpdateReport:
        """Commit the tensors received, as `commit`; or report the update committed since a client last ended one.

        Asked again with that update's version, it reports the same. Raises `LifecycleError` if no tensors of a further
        update have arrived: the report of an earlier one would present them as live.
        """
        number = as_version(version)
        if self.is_begun:
            if None not in (number, self._version) and number != self._version:
                what = f"{verb}: weight_version={number}, and the update was begun as {self._version}"
                raise ManifestMismatchError(f"{what}: end it with that version, or without one.")
            report = await self.commit(self._version if number is None else number)
        elif self._last is not None and not self.waits_for_end and self._may_report(self._last, number):
            report = self._last
        else:
            live = "" if self._last is None else f" The last update was that to version {self._last.version}."
            raise LifecycleError(f"{verb}: no tensors have arrived for this update: send them first.{live}")
        self._is_reported = True
        return report

    def _may_report(self, last: UpdateReport, version: int | None) -> bool:
        return version == last.version or (version is None and not self._is_reported)

    async def load(self, path: str, version: Any = None, **options: Any) -> UpdateReport:
        """Have the engine take a published store, a checkpoint or a GGUF file. Raises as `commit`."""
        number = as_version(version)
        if not os.path.exists(path):  # False too for an invalid path
            hint = f"A relative path is looked for in the server's working directory, {os.getcwd()}."
            raise RequestError.for_field("weight_dir", path, "a directory that this server can read", hint)
        self.drop()
        self._last = await self._engine.update_weights(path, version=number, **options)
        self._is_reported = False
        return self._last

    async def _check(self, specs: Sequence[TensorSpec]) -> None:
        if self._is_receiving:
            raise LifecycleError("Another call is receiving weights: they come one after the other.")
        self._is_reported = True
        if not self._most_bytes:
            await self._learn_size()
        with as_weight_errors():
            check_distinct([spec.name for spec in specs], "announced")
            for spec in specs:
                spec.check()
        twice = [spec.name for spec in specs if spec.name in self._tensors]
        if twice:
            what = f"{first_names(twice)} came already in this update"
            raise ManifestMismatchError(f"{what}: begin another one, or send each tensor once.")
        unused = set(await _get_unused_names(self._engine, [spec.name for spec in specs]))
        of_others = sum(spec.num_bytes for spec in specs if spec.name in unused)  # a composite's vision, for example
        size = max(self._num_bytes + sum(spec.num_bytes for spec in specs) - of_others, of_others)
        if size > self._most_bytes:
            what = f"{size} bytes of weights are announced, and the model has {self._most_bytes / _MOST_TIMES:.0f}"
            raise ManifestMismatchError(f"{what}: is it another model?")

    async def _keep(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        """Gather tensors, but for those that the model does not use: they begin no update, and complete none."""
        unused = set(await _get_unused_names(self._engine, [name for name, _ in pairs]))
        used = [(name, tensor) for name, tensor in pairs if name not in unused]
        self._tensors.update(used)
        self._num_bytes += sum(tensor.nbytes for _, tensor in used)

    async def weights(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every weight of the model, once."""
        metadata = await self._engine.get_model_metadata()
        return {name: metadata[name] for name in await self._missing_beside(())}

    async def _missing_beside(self, names: Iterable[str]) -> list[str]:
        missing: list[str] = await _get_missing_weights(self._engine, list(names))
        return missing

    async def _learn_size(self) -> None:
        weights = (await self.weights()).items()
        sizes = (TensorSpec(name, tuple(shape), dtype, "").num_bytes for name, (dtype, shape) in weights)
        self._most_bytes = _MOST_TIMES * sum(sizes)


def as_version(given: Any) -> int | None:
    """A version as clients write it: a number, or a text that ends with one ("weight_v000042"). None: the next one.

    Raises `RequestError` for anything else.
    """
    if given is None or given in ("", "default"):
        return None
    if type(given) is int and given >= 0:
        return given
    found = _NUMBER.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        bound = "a whole number, or a text that ends with one, such as weight_v000042"
        raise RequestError.for_field("weight_version", given, bound)
    return int(found[1])


def report_fields(report: UpdateReport) -> dict[str, Any]:
    """An update's report as JSON, with the fields that clients of either dialect look for."""
    message = f"version {report.version}: {report.num_tensors} tensors in {report.seconds:.3f} s"
    fields = msgspec.to_builtins(report)
    return {"success": True, "message": message, "weight_version": report.version, "report": fields}
