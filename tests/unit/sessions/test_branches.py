"""Which requests of an agent continue a row, and which begin one, and why."""

import json

import pytest

from rollout_engine.base.errors import RequestError

from .conftest import FORGETFUL, TEMPLATE

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def conversation(talk, *turns, start=(SYSTEM,)):
    """Play (question, answer) pairs; returns the conversation."""
    messages = list(start)
    for question, answer in turns:
        messages = talk.ask([*messages, user(question)], answer)
    return messages


def test_a_conversation_that_grows_is_one_row(talk):
    conversation(talk, ("a", "one"), ("b", " two "), ("c", "three"))
    assert talk.began == [("start", -1)]
    [row] = talk.session.rows()
    assert talk.text(row) == (
        "<system>Be brief.<eos><user>a<eos><assistant>one<eos><user>b<eos><assistant> two <eos>"
        "<user>c<eos><assistant>three<eos>"
    )
    assert [message["content"] for message in row.messages] == ["Be brief.", "a", "one", "b", " two ", "c", "three"]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_rollback_shares_the_ids_before_it(talk, steps):
    messages = conversation(talk, *((f"q{i}", f"a{i}") for i in range(4)))
    talk.ask([*messages[: -2 * steps], user("another")], "now")
    assert talk.began == [("start", -1), ("rollback", 0)]
    first, second = talk.session.rows()
    whole = first.prompt_token_ids + first.response
    assert whole[: second.num_shared] == second.prompt_token_ids[: second.num_shared]
    assert f"a{3 - steps}<eos>" in talk.codec.decode(whole[: second.num_shared]) and len(second.samples) == 1


def test_an_answer_that_is_asked_for_again_is_a_row_of_the_same_prompt(talk):
    messages = conversation(talk, ("a", "one"))
    talk.ask(messages[:-1], "two")
    assert talk.began == [("start", -1), ("rollback", 0)]
    first, second = talk.session.rows()
    assert first.prompt_token_ids == second.prompt_token_ids
    talk.ask([*messages[:-1], {"role": "assistant", "content": "two"}, user("b")], "three")
    assert [len(row.samples) for row in talk.session.rows()] == [1, 2]


def test_an_edited_message_is_a_branch_behind_the_answers_before_it(talk):
    messages = conversation(talk, ("a", "one"), ("b", "two"), ("c", "three"))
    edited = [*messages[:3], user("B"), *messages[4:], user("d")]
    talk.ask(edited, "four")
    assert talk.began == [("start", -1), ("edited", 0)]
    row = talk.session.rows()[1]
    assert "one<eos><user>B<eos><assistant>two<eos>" in talk.text(row) and len(row.samples) == 1


@pytest.mark.parametrize(
    "change, began",
    [
        (lambda text: text.strip(), "trimmed"),
        (lambda text: text + "\n", "trimmed"),
        (lambda text: text.replace("two", "2"), "edited"),
    ],
)
def test_an_answer_that_came_back_changed_is_a_branch(talk, change, began):
    messages = conversation(talk, ("a", "one"), ("b", " two "))
    messages[-1] = {"role": "assistant", "content": change(" two ")}
    talk.ask([*messages, user("c")], "three")
    assert talk.began == [("start", -1), (began, 0)]
    assert f"<assistant>{change(' two ')}<eos><user>c" in talk.text(talk.session.rows()[1])


def test_a_compaction_is_a_row_of_its_own(talk):
    conversation(talk, ("a", "one"), ("b", "two"), ("c", "three"))
    messages = talk.ask([SYSTEM, user("So far: three things.")], "four")
    talk.ask([*messages, user("e")], "five")
    assert talk.began == [("start", -1), ("compacted", 0)]
    assert [len(row.samples) for row in talk.session.rows()] == [3, 2]


def test_agents_below_with_system_prompts_of_their_own_are_rows(talk):
    main = conversation(talk, ("a", "one"))
    for name in ("first", "second"):
        conversation(talk, ("x", "y"), ("z", "w"), start=({"role": "system", "content": name},))
    talk.ask([*main, user("b")], "two")
    assert talk.began == [("start", -1), ("new_system", 0), ("new_system", 1)]
    assert [len(row.samples) for row in talk.session.rows()] == [2, 2, 2]


def test_other_tools_begin_a_row(talk):
    messages = talk.ask([SYSTEM, user("a")], "one", tools=[TOOL])
    messages = talk.ask([*messages, user("b")], "two", tools=[json.loads(json.dumps(TOOL, sort_keys=True))])
    talk.ask([*messages, user("c")], "three")
    assert talk.began == [("start", -1), ("tools_changed", 0)]


def test_parallel_requests_are_rows_and_the_first_to_end_continues(talk):
    messages = conversation(talk, ("a", "one"))
    places = [talk.place([*messages, user(text)]) for text in ("left", "right")]
    for place, said in zip(reversed(places), ("r", "l"), strict=True):
        talk.answer(place, said)
        talk.session.cancel(place)
    assert [talk.codec.decode(row.response).count("<user>") for row in talk.session.rows()] == [1, 0]
    assert talk.began[1] in [("rollback", 0), ("parallel", 0)] and "left<eos><assistant>l" in talk.text(
        talk.session.rows()[1]
    )


def test_a_cancelled_request_leaves_nothing(talk):
    messages = conversation(talk, ("a", "one"))
    talk.session.cancel(talk.place([*messages, user("never")]))
    talk.ask([*messages, user("b")], "two")
    assert talk.began == [("start", -1)] and "never" not in talk.text(talk.session.rows()[0])


def test_samples_of_one_request_are_rows(talk):
    place = talk.place([SYSTEM, user("a")], n=3)
    answers = [talk.answer(place, said) for said in ("x", "y", "x")]
    talk.session.cancel(place)
    talk.ask([SYSTEM, user("a"), answers[1], user("b")], "z")
    assert talk.began == [("start", -1), ("sample", 0), ("sample", 0)]
    assert [len(row.samples) for row in talk.session.rows()] == [1, 2, 1]


def call(arguments, name="add", call_id="call_1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLED = '<tool_call>{"b": 2.0, "a": [1]}</tool_call>'


@pytest.mark.parametrize(
    "returned",
    [
        {"content": None, "tool_calls": [call('{"b": 2.0, "a": [1]}')]},
        {"content": "", "tool_calls": [call('{"a":[1],"b":2}', call_id="toolu_9")]},
        {"content": [], "tool_calls": [call({"a": [1], "b": 2.0})], "refusal": None, "annotations": []},
    ],
    ids=["as it was", "reordered", "as an object"],
)
def test_calls_are_compared_by_value(talk, returned):
    sent = {"content": None, "tool_calls": [call('{"b": 2.0, "a": [1]}')]}
    asked = [user("a")]
    talk.ask(asked, CALLED, message=sent, tools=[TOOL])
    result = {"role": "tool", "content": "3", "tool_call_id": returned["tool_calls"][0]["id"]}
    messages = talk.ask([*asked, {"role": "assistant", **returned}, result], "It is 3.", tools=[TOOL])
    talk.ask([*messages, user("b")], "two", tools=[TOOL])
    assert talk.began == [("start", -1)]
    assert CALLED + "<eos><tool>3<eos>" in talk.text(talk.session.rows()[0])


STRICT = TEMPLATE.replace(
    "<{{ m.role }}>",
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "<{{ m.role }}>",
)


def test_a_template_that_wants_calls_before_their_results_is_continued(new_talk):
    talk = new_talk(STRICT)
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    messages = [user("a")]
    for number in range(3):
        sent = {"content": "", "tool_calls": [call({"a": 1}, call_id=f"call_{number}")]}
        messages = talk.ask(messages, said, message=sent, tools=[TOOL])
        messages.append({"role": "tool", "content": "3", "tool_call_id": f"call_{number}"})
    messages = talk.ask(messages, "Three.", tools=[TOOL])
    talk.ask([*messages, user("b")], "two", tools=[TOOL])
    talk.check()
    assert talk.began == [("start", -1)] and talk.text(talk.session.rows()[0]).count(said + "<eos><tool>3<eos>") == 3
    talk.ask([*messages[:3], user("c")], "two", tools=[TOOL])
    assert talk.began == [("start", -1), ("rollback", 0)]


def test_other_arguments_are_an_edit(talk):
    talk.ask([user("a")], CALLED, message={"content": "", "tool_calls": [call({"a": 1})]}, tools=[TOOL])
    changed = {"role": "assistant", "content": "", "tool_calls": [call({"a": 2})]}
    result = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    talk.ask([user("a"), changed, result], "It is 3.", tools=[TOOL])
    assert talk.began == [("start", -1), ("edited", 0)]


def test_thinking_that_does_not_come_back_is_a_branch_if_the_template_shows_it(talk):
    sent = {"content": "one", "reasoning_content": "hm"}
    messages = talk.ask([user("a")], "<think>hm</think>one", message=sent)
    talk.ask([*messages, user("b")], "two")
    assert talk.began == [("start", -1)]
    talk.ask([messages[0], {"role": "assistant", "content": "one"}, user("b")], "two")
    assert talk.began == [("start", -1), ("thinking_dropped", 0)]


def test_a_template_that_rewrites_earlier_turns_makes_branches(new_talk):
    talk = new_talk(FORGETFUL)
    messages = talk.ask([user("a")], "<think>hm</think>one")
    messages = talk.ask([*messages, user("b")], "two")
    talk.ask([*messages, user("c")], "three")
    talk.check()
    assert talk.began == [("start", -1), ("template", 0)]
    assert "hm" not in talk.text(talk.session.rows()[1])
    hidden = new_talk(FORGETFUL.replace("m.reasoning_content", "m.never"))
    messages = hidden.ask([user("a")], "<think>hm</think>one", message={"content": "one", "reasoning_content": "hm"})
    hidden.ask([messages[0], {"role": "assistant", "content": "one"}, user("b")], "two")
    assert hidden.began == [("start", -1), ("template", 0)], "it does not show thinking anyway"


def test_an_answer_that_was_cut_off_is_continued(talk):
    place = talk.place([user("a")])
    answer = talk.answer(place, "unfinish", finish_reason="length")
    talk.session.cancel(place)
    talk.ask([user("a"), answer, user("go on")], "ed")
    assert talk.began == [("start", -1)]
    assert "unfinish<eos><user>go on" in talk.text(talk.session.rows()[0])


def test_text_in_parts_is_text(talk):
    messages = talk.ask([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "one")
    returned = {"role": "assistant", "content": [{"type": "text", "text": "one"}]}
    talk.ask([user("a"), returned, user("b")], "two")
    assert talk.began == [("start", -1)] and len(messages) == 2


def test_an_answer_that_is_left_open_is_not_continued_by_ids(talk):
    messages = conversation(talk, ("a", "one"))
    place = talk.place(messages, continue_final_message=True, add_generation_prompt=False)
    assert talk.codec.decode(place.prompt_token_ids).endswith("<assistant>one")
    talk.session.cancel(place)


def test_arguments_that_cannot_be_encoded_are_refused_by_name(talk):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(RequestError, match=r"messages\[1\].*encoded"):
        talk.place(messages)
