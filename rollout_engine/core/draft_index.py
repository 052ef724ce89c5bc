"""Rollouts to draft from: finished samples are kept by prompt, and indexed while a sequence of the prompt lives."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.core.drafts import NUM_KEY_TOKENS, PromptDrafts
from rollout_engine.core.request import Request, Sequence

_MAX_INDEXED_TOKENS = 1 << 19
"""Tokens of live prompts that are indexed, some 200 bytes each."""
_MAX_PROMPT_TOKENS = 1 << 16
"""The same of one prompt, before it is indexed anew from the samples that are kept."""
_RUNS_PER_PROMPT = 16
"""Finished samples that are kept of one prompt: the newest."""


class DraftIndex:
    """The drafts of every prompt: indexed while a sequence of it lives, else as plain tokens, in bounded memory."""

    def __init__(self, max_rollout_tokens: int) -> None:
        self._max_rollout_tokens = max_rollout_tokens
        self._open: dict[bytes, PromptDrafts] = {}
        self._kept: OrderedDict[bytes, deque[array[int]]] = OrderedDict()
        """Finished samples by prompt, each behind the prompt's last tokens; the newest prompt last."""
        self.num_kept_tokens = 0

    def open(self, request: Request, *, shared: bool) -> PromptDrafts | None:
        """The drafts for one more sequence of `request`; None while too many tokens are indexed.

        `shared`: with those of every sequence of the same prompt, finished ones included.
        """
        if sum(each.num_indexed for each in self._open.values()) > _MAX_INDEXED_TOKENS:
            return None
        prompt = request.source.prompt_token_ids
        if not shared:
            return PromptDrafts(b"", prompt)
        key = _key_of(request)
        drafts = self._open.get(key)
        if drafts is None or drafts.num_indexed > _MAX_PROMPT_TOKENS:
            drafts = self._open[key] = PromptDrafts(key, prompt)
            for run in self._kept.get(key, ()):
                drafts.index(drafts.add(run.tolist()), 0)
        drafts.num_users += 1
        return drafts

    def close(self, drafts: PromptDrafts) -> None:
        """Undo one `open`."""
        drafts.num_users -= 1
        if drafts.num_users == 0 and self._open.get(drafts.key) is drafts:
            del self._open[drafts.key]

    def keep(self, sequence: Sequence) -> None:
        """Keep the tokens of a sequence that has ended."""
        first = sequence.num_prompt_tokens
        if len(sequence.token_ids) == first or not self._max_rollout_tokens:
            return
        run = array("I", sequence.token_ids[max(first - NUM_KEY_TOKENS, 0) :])
        self.load(_key_of(sequence.request), [run])

    def add(self, prompts: Iterable[tuple[bytes, Iterable[Iterable[int]]]]) -> None:
        """Keep runs by the key of their prompt, the newest last. If rollouts are not kept, nothing is."""
        for key, runs in prompts if self._max_rollout_tokens else ():
            self.load(key, [array("I", run) for run in runs])

    def load(self, key: bytes, runs: Iterable["array[int]"]) -> None:
        """Keep runs of the prompt of this key, the newest last, and each once."""
        kept = self._kept.setdefault(key, deque())
        self._kept.move_to_end(key)
        for run in runs:
            if run in kept:
                kept.remove(run)
                self.num_kept_tokens -= len(run)
            kept.append(run)
            self.num_kept_tokens += len(run)
        while len(kept) > _RUNS_PER_PROMPT:
            self.num_kept_tokens -= len(kept.popleft())
        while self.num_kept_tokens > self._max_rollout_tokens:
            _, forgotten = self._kept.popitem(last=False)
            self.num_kept_tokens -= sum(map(len, forgotten))

    def list_prompts(self) -> Iterable[tuple[bytes, list["array[int]"]]]:
        """Key and runs of every prompt, the newest last."""
        return [(key, list(runs)) for key, runs in self._kept.items()]


def prompt_key(prompt_token_ids: list[int], cache_salt: str = "", pictures: Iterable[PlacedPicture] = ()) -> bytes:
    """Identity of a prompt with its pictures, under its cache salt: blake2b-128, the same in every process."""
    prompt = array("I", prompt_token_ids).tobytes()
    salt = cache_salt.encode("utf-8", "surrogatepass")
    places = b"".join(array("Q", (each.start, each.end)).tobytes() + each.picture.digest for each in pictures)
    person = hashlib.blake2b(places, digest_size=16).digest() if places else b""
    key = hashlib.blake2b(salt, digest_size=32, person=person).digest()
    return hashlib.blake2b(prompt, digest_size=16, key=key).digest()


def _key_of(request: Request) -> bytes:
    source = request.source
    return prompt_key(source.prompt_token_ids, source.cache_salt, source.pictures)
