"""A book of requests: each ends exactly once; its tokens come without gap or repetition, and are the right ones.

engine.generate ──outputs──> Ledger.run ──> Entry.hear      every output is checked as it comes
                                        ──> Entry.end       how it ended, once
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable

from rollout_engine import AsyncLLM, RequestOutput, RolloutEngineError, SamplingParams
from rollout_engine.base.outputs import CompletionOutput, VersionSpan
from tests.faults.plan import FaultPlan

Check = Callable[[int, list[int], list[VersionSpan]], None]
"""(sample index, all its tokens so far, their spans): AssertionError when these are not the tokens it should have."""


class Entry:
    """One request."""

    def __init__(self, name: str, params: SamplingParams, check: Check) -> None:
        self.name, self.params, self._check = name, params, check
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.spans: dict[int, list[VersionSpan]] = defaultdict(list)
        self.reasons: dict[int, str] = {}
        self.ended = ""
        """"finished", "left", or the name of the error that it raised."""
        self.went_back = ""
        """Of which sample the versions did, if they did: only an update with `reset_version` may do that."""

    def hear(self, output: RequestOutput) -> None:
        """Check one output and write it down."""
        assert not self.ended, f"{self.name}: an output came after it had ended: {self.ended}"
        assert output.request_id == self.name
        for sample in output.outputs:
            self._hear(sample)
        assert output.finished == (len(self.reasons) == self.params.n), f"{self.name}: finished={output.finished}"

    def end(self, how: str) -> None:
        """It has ended."""
        assert not self.ended, f"{self.name}: ended twice, {self.ended} and {how}"
        assert how != "finished" or len(self.reasons) == self.params.n, f"{self.name}: ended without a last output"
        self.ended = how

    def _hear(self, sample: CompletionOutput) -> None:
        index, is_delta = sample.index, self.params.output_kind == "delta"
        known = self.tokens[index]
        where = f"{self.name}[{index}]"
        repeated = index in self.reasons and (is_delta or sample.token_ids != known)
        assert not repeated, f"{where}: more of a sample that had ended"
        start = len(known) if is_delta else 0
        position = start
        for span in sample.version_spans:
            assert (span.start, span.end > span.start) == (position, True), f"{where}: {sample.version_spans}"
            assert span.kv_min_version <= span.policy_version, f"{where}: {span}"
            position = span.end
        versions = [span.policy_version for span in sample.version_spans]
        if versions != sorted(versions):
            self.went_back = f"{where}: versions went back: {versions}"
        assert position == start + len(sample.token_ids), f"{where}: spans end at {position}"
        if is_delta:
            known += sample.token_ids
            self.spans[index] += sample.version_spans
        else:
            assert sample.token_ids[: len(known)] == known, f"{where}: tokens changed"
            self.tokens[index], self.spans[index] = sample.token_ids, sample.version_spans
        if sample.finish_reason is not None:
            self.reasons[index] = sample.finish_reason
            assert sample.error is None or sample.finish_reason == "error"
        self._check_tokens(where, index)

    def _check_tokens(self, where: str, index: int) -> None:
        count, most = len(self.tokens[index]), self.params.max_tokens
        assert most is not None
        assert count <= most, f"{where}: {count} tokens of {most}"
        if self.reasons.get(index) == "length":
            assert count == most, f"{where}: {count} tokens of {most}, and yet it ended by length"
        self._check(index, self.tokens[index], self.spans[index])


class Ledger:
    """All requests of a run. `plan` hears "output" for every output and "end" for every end."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.entries: dict[str, Entry] = {}
        self.num_tokens = 0
        self.counts: Counter[str] = Counter()
        """How requests ended -> how many."""
        self.went_back: list[str] = []
        """Requests whose versions did."""

    @property
    def open(self) -> list[str]:
        """Requests that have not ended."""
        return list(self.entries)

    @property
    def num_ended(self) -> int:
        """Requests that have."""
        return sum(self.counts.values())

    async def run(
        self,
        engine: AsyncLLM,
        prompt: list[int],
        params: SamplingParams,
        name: str,
        check: Check,
        *,
        leave_after: int | None = None,
    ) -> Entry:
        """Run one request to its end, whatever that is. `leave_after`: outputs after which its reader goes away."""
        entry = self.begin(name, params, check)
        how, num_outputs = "finished", 0
        try:
            async with contextlib.aclosing(engine.generate(prompt, params, name)) as outputs:
                async for output in outputs:
                    entry.hear(output)
                    self.plan.reached("output")
                    num_outputs += 1
                    if num_outputs == leave_after and not output.finished:
                        how = "left"
                        break
        except RolloutEngineError as error:
            how = type(error).__name__
        self.end(entry, how)
        return entry

    def begin(self, name: str, params: SamplingParams, check: Check) -> Entry:
        """Open a request."""
        assert name not in self.entries, name
        entry = self.entries[name] = Entry(name, params, check)
        return entry

    def end(self, entry: Entry, how: str) -> None:
        """Close a request; `how` as in `Entry.ended`."""
        entry.end(how)
        del self.entries[entry.name]
        self.went_back += [entry.went_back] if entry.went_back else []
        reasons = "/".join(sorted(set(entry.reasons.values()))) if how == "finished" else how
        self.counts[reasons] += 1
        self.num_tokens += sum(map(len, entry.tokens.values()))
        self.plan.reached("end")

    def assert_clean(self, *, versions_go_back: bool = False) -> None:
        """Every request has ended, and every fault of the plan has struck. `versions_go_back`: an update said so."""
        assert versions_go_back or not self.went_back, self.went_back
        assert not self.entries, f"{len(self.entries)} requests never ended: {sorted(self.entries)[:5]}"
        self.plan.assert_all_struck()
