"""Pictures in the core: whose KV serves whose, what is refused, and random prompts against the slow truth."""

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import Picture, PictureInfo, PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.sequence_error import SequenceError
from rollout_engine.core import config, picture_keys
from rollout_engine.core.draft_index import prompt_key
from rollout_engine.core.picture_keys import PictureKeys
from rollout_engine.core.request import Request
from tests.unit.core.conftest import IMAGE
from tests.unit.core.oracle import make_oracle_rig
from tests.unit.core.random_operations import SHAPES, Monkey


def picture(number):
    return Picture.of({"pixel_values": np.full((2, 3), number, np.float32), "grid": np.array([[1, 2, 3]])})


A, B = picture(1), picture(2)
BREAK = 21


def prompt_of(*parts):
    """Token ids, and the places of the pictures in them; a part is a token id, or (picture, ids of its span)."""
    token_ids, placed = [], []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
        else:
            found, span = part
            placed.append(PlacedPicture(len(token_ids), len(token_ids) + len(span), found))
            token_ids += span
    return token_ids, placed


def num_cached(rig, name, prompt, **options):
    token_ids, placed = prompt
    rig.add(name, token_ids, pictures=placed, max_tokens=2, **options)
    rig.run()
    return rig.ends[name, 0].num_cached_tokens


def around(found, num_placeholders=6):
    """Nine tokens, a picture of six, and five more: blocks of four, of which the first two are before the picture."""
    return prompt_of(*range(9), (found, [IMAGE] * num_placeholders), *range(5))


def test_equal_ids_with_other_pictures_share_the_blocks_before_the_picture_and_none_after(make_rig):
    rig = make_rig(block_size=4)
    assert num_cached(rig, "a", around(A)) == 0
    assert num_cached(rig, "b", around(B)) == 8
    assert num_cached(rig, "a again", around(picture(1))) == 16
    assert num_cached(rig, "no picture", (around(A)[0], [])) == 8
    rig.assert_clean()


def test_placeholders_outside_of_spans_are_tokens_of_their_own(make_rig):
    rig = make_rig(block_size=4)
    bare = [*range(4), *[IMAGE] * 12, 5]
    assert num_cached(rig, "text", (bare, [])) == 0
    assert num_cached(rig, "text again", (bare, [])) == 16
    assert num_cached(rig, "picture", prompt_of(*range(4), (A, [IMAGE] * 12), 5)) == 4
    rig.assert_clean()


def test_the_tokens_between_placeholders_count_and_so_does_where_a_picture_begins(make_rig):
    rig = make_rig(block_size=4)
    rows = [IMAGE, IMAGE, BREAK, IMAGE, IMAGE, BREAK, IMAGE, IMAGE]
    columns = [IMAGE, BREAK, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, IMAGE]
    for name, prompt, expected in (
        ("rows", prompt_of(*range(4), (A, rows), 5), 0),
        ("columns", prompt_of(*range(4), (A, columns), 5), 4),
        ("twice", prompt_of(*range(4), (A, [IMAGE] * 4), (A, [IMAGE] * 4), 5), 4),
        ("once", prompt_of(*range(4), (A, [IMAGE] * 8), 5), 4),
        ("other order", prompt_of(*range(4), (B, [IMAGE] * 4), (A, [IMAGE] * 4), 5), 4),
        ("rows again", prompt_of(*range(4), (A, rows), 5), 12),
    ):
        assert num_cached(rig, name, prompt) == expected, name
    rig.assert_clean()


def test_snapshots_of_states_are_found_for_the_same_picture_alone(make_rig):
    rig = make_rig(block_size=4, num_state_slots=40, state_interval=8)
    assert num_cached(rig, "a", around(A)) == 0
    assert num_cached(rig, "b", around(B)) == 8
    assert num_cached(rig, "a again", around(A)) == 16
    rig.assert_clean()


def test_the_next_turn_continues_behind_the_picture(make_rig):
    rig = make_rig(block_size=4)
    token_ids, placed = around(A)
    num_cached(rig, "turn 1", (token_ids, placed))
    history = [*token_ids, *rig.tokens["turn 1", 0], 7]
    assert num_cached(rig, "turn 2", (history, placed)) == len(history) - 2
    assert num_cached(rig, "other picture", (history, around(B)[1])) == 8
    rig.assert_clean()


def test_a_picture_that_was_forgotten_is_a_miss_and_no_number_is_given_twice(make_rig, monkeypatch):
    rig = make_rig(block_size=4)
    rig.core._requests.picture_keys = PictureKeys(rig.config.pictures, max_known=1)
    assert [num_cached(rig, str(i), around(each)) for i, each in enumerate((A, A, B, A))] == [0, 16, 8, 8]
    keys = PictureKeys(PictureInfo(IMAGE), max_known=4)
    numbers = [keys._number_of(bytes([i % 7]) * 16) for i in range(50)]
    assert len(set(numbers)) == 50 and len(keys._numbers) == 4
    monkeypatch.setattr(picture_keys, "_END", max(numbers) + 1)
    with pytest.raises(LifecycleError, match="add_request: this engine has had .* pictures: make a new one"):
        keys._number_of(b"another one.....")


def test_keys_of_drafts_are_the_same_in_every_process_and_tell_pictures_apart():
    token_ids, placed = around(A)
    others = [(), around(B)[1], [PlacedPicture(9, 14, A)], [PlacedPicture(8, 15, A)]]
    keys = [prompt_key(token_ids, "", each) for each in (placed, *others)] + [prompt_key(token_ids, "x", placed)]
    assert len(set(keys)) == len(keys)
    assert prompt_key(token_ids, "", around(picture(1))[1]) == keys[0]
    assert prompt_key([2, 3, 4]).hex() == "e1d75b0bc9c6457740644cb8c0f072d1"  # as in files of drafts from before


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(pictures=[PlacedPicture(9, 15, A), PlacedPicture(14, 15, B)]), r"pictures\[1\]=\(14, 15\).*\[15, 20\]"),
        (dict(pictures=[PlacedPicture(9, 21, A)]), r"pictures\[0\]=\(9, 21\)"),
        (dict(pictures=[PlacedPicture(-1, 15, A)]), r"pictures\[0\]=\(-1, 15\)"),
        (dict(pictures=[PlacedPicture(9, 9, A)]), r"pictures\[0\]=\(9, 9\)"),
        (dict(pictures=[PlacedPicture(8, 15, A)]), r"pictures\[0\]=\(8, 15\).*token 22"),
        (dict(pictures=[PlacedPicture(9, 16, A)]), r"pictures\[0\]=\(9, 16\).*at both ends"),
        (dict(pictures=[PlacedPicture(9, 15, Picture(b"short", A.arrays))]), r"pictures\[0\].*5 bytes.*16 bytes"),
        (dict(pictures=[PlacedPicture(9, 15, Picture(bytes(16), {}))]), r"pictures\[0\].* 0 arrays"),
        (dict(pictures=[PlacedPicture(9 + i, 10 + i, A) for i in range(3)]), "3 pictures.*at most 2"),
    ],
)
def test_what_is_no_picture_of_the_prompt_is_refused_by_its_place(make_rig, change, match):
    rig = make_rig(max_prompt_pictures=2)
    token_ids, placed = around(A)
    request = EngineCoreRequest(
        prompt_token_ids=token_ids, params=SamplingParams(), max_tokens=2, seed=0, first_sequence_id=0, pictures=placed
    )
    with pytest.raises(RequestError, match=match):
        rig.core.add_request(msgspec.structs.replace(request, **change))
    assert not rig.core.has_unfinished_requests()
    rig.core.add_request(request)


@pytest.mark.parametrize(
    "info, match", [(None, "has no vision tower"), (PictureInfo(IMAGE, "Its tower is cut."), "must be none. Its tower")]
)
def test_a_model_that_takes_no_pictures_says_why(make_rig, info, match):
    rig = make_rig(pictures=info)
    token_ids, placed = around(A)
    with pytest.raises(RequestError, match=f"pictures='1 pictures' is not allowed.*{match}"):
        rig.add("a", token_ids, pictures=placed)


def test_requests_without_pictures_make_no_call_more(make_rig, monkeypatch):
    for name in ("keys_of", "_number_of"):
        monkeypatch.setattr(PictureKeys, name, None)
    monkeypatch.setattr(Request, "put_keys", None)
    rig = make_rig(block_size=4)
    assert [num_cached(rig, name, (around(A)[0], []), n=2) for name in "ab"] == [0, 16]
    rig.assert_clean()


def test_a_sequence_that_cannot_be_computed_ends_its_own_request_alone(make_rig):
    rig = make_rig(block_size=4)
    token_ids, placed = around(A)
    for name, n in (("before", 2), ("bad", 3), ("after", 1)):
        rig.add(name, token_ids if name == "bad" else [*range(9), 3], pictures=placed if name == "bad" else (), n=n)
        if name == "bad":
            rig.uncomputable |= set(rig.ids("bad"))
        rig.step()
    rig.run()
    assert {rig.ends["bad", index].error for index in range(3)} == {"it cannot be computed"}
    others = {end.finish_reason for (name, _), end in rig.ends.items() if name != "bad"}
    assert others == {"length"} and rig.core.stats.num_failed_steps == 1
    rig.assert_clean()


def test_an_error_of_a_sequence_that_is_in_no_step_ends_the_step(make_rig):
    rig = make_rig(block_size=4)
    rig.executor.execute = lambda work: (_ for _ in ()).throw(SequenceError(99, "of another step"))
    rig.add("a", range(9))
    rig.run()
    assert "SequenceError: of another step" in rig.ends["a", 0].error


class PictureMonkey(Monkey):
    """Its prompts share prefixes whose ids are equal and whose pictures differ; some requests cannot be computed."""

    def act(self):
        if self.random.random() < 0.03 and (live := [key for key in self.rig.tokens if key not in self.rig.ends]):
            self.rig.uncomputable.update(self.rig.ids(self.random.choice(live)[0]))
        super().act()

    def add(self):
        added, self.rig.add = self.rig.add, self._add_with_pictures
        self._added = added
        try:
            super().add()
        finally:
            del self.rig.add

    def _add_with_pictures(self, name, prompt, **options):
        prompt, placed = list(prompt), []
        for start in (2, 9, 17):
            if start + 5 <= len(prompt) and self.random.random() < 0.7:
                prompt[start : start + 5] = [IMAGE, BREAK, IMAGE, IMAGE, IMAGE]
                placed.append(PlacedPicture(start, start + 5, self.random.choice([A, B])))
        self._added(name, prompt, pictures=placed, **options)


def run(rig, seed, num_operations):
    monkey = PictureMonkey(rig, seed)
    for _ in range(num_operations):
        monkey.act()
        rig.core.check_integrity()
    rig.run(max_steps=20_000)
    rig.assert_clean()
    assert sum(len(request.pictures) for request in rig.requests.values()) > 10
    assert any(end.error == "it cannot be computed" for end in rig.ends.values())
    for end in rig.ends.values():
        if end.finish_reason == "error":
            assert end.error in ("spoilt", "it cannot be computed") or "told to fail" in end.error


@pytest.mark.quick(1)
@pytest.mark.parametrize("states", [False, True], ids=["kv", "states"])
@pytest.mark.parametrize("shape", ["tiny pool", "wide blocks, few slots"])
def test_random_prompts_with_pictures_get_their_own_tokens(make_rig, monkeypatch, some_of, shape, states):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)
    sizes = dict(vocab_size=23, policy_version=100) | SHAPES[shape]
    if states:
        sizes |= dict(num_state_slots=sizes["max_num_seqs"] + 9, state_interval=2 * sizes["block_size"])
    run(make_rig(**sizes), f"pictures {shape} {states}", some_of(1000))


def test_drafts_behind_pictures_change_no_token(make_rig_in_turn, some_of):
    rig = make_oracle_rig(make_rig_in_turn, vocab_size=23, policy_version=100, **SHAPES["roomy"])
    run(rig, "drafts", some_of(1000))
    assert sum(rig.core.stats.drafts.num_accepted) > 0


def test_a_continuation_behind_a_picture_gets_the_tokens_it_would_have_had(make_rig):
    rig = make_rig(block_size=4)
    token_ids, placed = around(A)
    rig.add("whole", token_ids, pictures=placed, max_tokens=9)
    rig.run()
    tokens = rig.tokens["whole", 0]
    rest = msgspec.structs.replace(
        rig.requests["whole"], first_sequence_id=50, output_token_ids=tokens[:4], cache_salt="none shared"
    )
    rig.keys[50], rig.requests["rest"], rig.tokens["rest", 0] = ("rest", 0), rest, tokens[:4]
    rig.core.add_request(rest)
    rig.run()
    assert rig.tokens["rest", 0] == tokens
