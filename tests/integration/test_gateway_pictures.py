"""Agents that show the policy pictures: rows carry them as those of rollouts do, and log-probs are the trainer's."""

import base64
import io

import httpx2
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rollout_engine import Agent, RolloutPolicy, SamplingParams, exact, read_jsonl
from rollout_engine.base.pictures import Picture
from rollout_engine.rollouts.replay import replay
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint


def png(seed):
    data = io.BytesIO()
    random_picture(seed).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def shown(seed, text="Which?"):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(seed)}"}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(str(checkpoint), dtype="float32", max_prompt_pictures=3) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(checkpoint):
    return exact.enable(AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32))


@pytest.fixture(scope="module")
def gateway(policy):
    with policy.gateway(SamplingParams(temperature=1.0)) as made:
        yield made


def ask(session, messages, **options):
    with openai.OpenAI(base_url=session.openai_base_url, api_key=session.api_key, max_retries=0) as client:
        answer = client.chat.completions.create(model="default", messages=messages, max_tokens=6, **options)
    return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


def differing(trainer, batch):
    """Sampled tokens whose log-probs differ between engine and trainer."""
    given = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    ours = exact.token_logprobs(trainer, *given, **exact.inputs(batch))
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    assert sampled.any()
    return int((ours != batch["log_probs", "full"][:, 1:])[sampled].sum())


def test_pictures_of_a_session_stand_in_its_rows_and_are_exact(gateway, trainer, policy, tmp_path):
    session = gateway.session(group_id=0)
    first = ask(session, [shown(1)], seed=1)
    second = ask(session, [*first, shown(2, "And this?")], seed=2)
    ask(session, [*second, {"role": "user", "content": "Both?"}], seed=3)
    ask(session, [*first, shown(3, "Or this?")], seed=4)  # a rollback, with another picture
    ask(session, [shown(2), *first[1:], {"role": "user", "content": "And?"}], seed=5)  # another first picture
    rows = session.rows()
    assert [(row.began, row.parent_row, len(row.pictures)) for row in rows] == [
        ("start", -1, 2),
        ("rollback", 0, 2),
        ("compacted", 1, 1),
    ]
    image_id = policy.frontend.client.info.pictures.image_token_id
    for row in rows:
        ids = row.prompt_token_ids + row.response
        for each in row.pictures:
            assert ids[each.start] == ids[each.end - 1] == image_id
        kept = [part["image"] for message in row.messages[:1] for part in message["content"] if part["type"] == "image"]
        assert [each.digest for each in kept] == [row.pictures[0].picture.digest] and isinstance(kept[0], Picture)
    assert rows[0].pictures[0].picture is rows[1].pictures[0].picture, "a session keeps each picture once"
    assert rows[2].pictures[0].picture is rows[0].pictures[1].picture
    held = session._session
    assert held.num_bytes > sum(p.picture.num_bytes for p in [*rows[0].pictures, rows[1].pictures[1]])
    batch = gateway.batch([session], rewards=[1.0])
    assert [len(row) for row in batch["pictures"]] == [2, 2, 1] and differing(trainer, batch) == 0
    session.close()
    assert held.num_bytes == 0 and gateway._server.app.served.sessions.registry.memory.num_bytes == 0


@pytest.mark.parametrize("dialect", ["messages", "responses"])
def test_the_other_dialects_bring_pictures_too(gateway, trainer, dialect):
    session, path, pictures = gateway.session(), f"/v1/{dialect}", [png(4), png(5)]
    messages = []
    with httpx2.Client(base_url=session.anthropic_base_url, headers={"x-api-key": session.api_key}, timeout=60) as http:
        for data in pictures:
            if dialect == "messages":
                source = {"type": "base64", "media_type": "image/png", "data": data}
                content = [{"type": "image", "source": source}, {"type": "text", "text": "Which?"}]
                body = {"messages": [*messages, {"role": "user", "content": content}], "max_tokens": 6}
            else:
                content = [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"}]
                body = {"input": [*messages, {"role": "user", "content": content}], "max_output_tokens": 6}
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            said = answer.json()
            last = {"role": "assistant", "content": said["content"]} if dialect == "messages" else said["output"]
            messages = [*body.get("messages", body.get("input")), *(last if isinstance(last, list) else [last])]
    [row] = session.rows()
    assert len(row.samples) == 2 and len(row.pictures) == 2
    assert differing(trainer, gateway.batch([session])) == 0
    session.close()


def test_a_response_that_a_request_names_has_its_pictures(gateway):
    session = gateway.session()
    with openai.OpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client:
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{png(6)}", "detail": "auto"}
        first = client.responses.create(model="m", input=[{"role": "user", "content": [image]}], max_output_tokens=4)
        more = [{"role": "user", "content": [image, {"type": "input_text", "text": "again"}]}]
        client.responses.create(model="m", input=more, previous_response_id=first.id, max_output_tokens=4)
    [row] = session.rows()
    assert len(row.pictures) == 2 and row.pictures[0].picture is row.pictures[1].picture
    session.close()


def test_rows_over_http_name_pictures_by_digest_and_bring_each_once(gateway):
    session = gateway.session()
    ask(session, ask(session, [shown(7)]) + [shown(7)])
    with httpx2.Client(base_url=gateway.url, headers={"x-api-key": gateway.options.api_key}) as http:
        found = http.get(f"/sessions/{session.id}/rows").json()
    [row], (digest,) = found["rows"], found["pictures"]
    assert [each["picture"] for each in row["pictures"]] == [digest] * 2
    assert row["messages"][0]["content"][0] == {"type": "image", "image": digest}
    arrays = {
        name: np.frombuffer(base64.b64decode(each["data"]), each["dtype"]).reshape(each["shape"])
        for name, each in found["pictures"][digest].items()
    }
    assert Picture.of(arrays).digest.hex() == digest
    session.close()


@pytest.mark.parametrize(
    "messages, said",
    [
        ([{"role": "user", "content": "See <|image_pad|>."}], "<|image_pad|>"),
        ([shown(1), shown(2), shown(3), shown(4)], "max_prompt_pictures"),
        ([{"role": "user", "content": [{"type": "image"}]}], "data URL"),
    ],
)
def test_pictures_that_cannot_be_are_refused_and_leave_nothing(gateway, messages, said):
    session = gateway.session()
    url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}
    answer = httpx2.post(url, json={"messages": messages, "max_tokens": 2}, headers=headers, timeout=60)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert session.rows() == [] and session._session.num_open == 0 and session._session.num_bytes < 10_000
    session.close()


def test_placeholders_behind_an_answer_are_refused(gateway):
    session = gateway.session()
    messages = [*ask(session, [shown(1)]), {"role": "user", "content": "and <|image_pad|>"}]
    url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}
    answer = httpx2.post(url, json={"messages": messages}, headers=headers, timeout=60)
    assert answer.status_code == 400 and "<|image_pad|>" in answer.json()["error"]["message"]
    session.close()


def test_agents_are_trained_on_pictures_and_files_hold_them(policy, trainer, tmp_path):
    def look(session, task):
        ask(session, ask(session, [shown(task)]) + [shown(task + 1)])
        return float(task)

    options = {"env": Agent(look), "num_samples": 2, "seed": 3, "use_tqdm": False}
    batch = policy.rollout([8, 9], SamplingParams(max_tokens=5), **options, log_to=tmp_path / "rows.jsonl")
    assert not any(batch["error"]) and [len(row) for row in batch["pictures"]] == [2] * 4
    assert differing(trainer, batch) == 0
    read = list(read_jsonl(tmp_path / "rows.jsonl"))
    assert len(read) == 4 and all(report.is_equal for report in replay(policy, read))


def test_a_model_without_eyes_refuses_pictures_in_a_session(tmp_path):
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path), max_model_len=128) as blind:
        with blind.gateway() as gateway:
            session = gateway.session()
            url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}
            answer = httpx2.post(url, json={"messages": [shown(1)]}, headers=headers)
            assert answer.status_code == 400 and "takes no pictures" in answer.json()["error"]["message"]
