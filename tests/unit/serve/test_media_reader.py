"""Pictures stand in place of the texts that name them, and are counted until a request has been answered."""

import asyncio
import base64
import gc
import threading

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture
from rollout_engine.serve.media import reader as reading
from rollout_engine.serve.media.reader import MediaReader
from rollout_engine.serve.media.sources import sources_of
from rollout_engine.serve.openai.chat import ChatBody
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked
from rollout_engine.serve.sglang.generate import GenerateBody
from rollout_engine.serve.vllm.inference import InferenceBody
from rollout_engine.text.picture_processor import ReadPicture

TEXT = base64.b64encode(b"picture").decode()
URL = f"data:image/png;base64,{TEXT}"


def asked(kind, **fields):
    return Asked(msgspec.convert(fields, kind), {}, "one")


def chat(*parts):
    return asked(ChatBody, messages=[{"role": "system", "content": "hello"}, {"role": "user", "content": [*parts]}])


def read_image(data, field):
    """A picture whose text names the place that it was read for, and whose array has four times its bytes."""
    return ReadPicture(Picture.of({"pixel_values": np.frombuffer(data, np.uint8).astype(np.float32)}), field)


def read(given, **options):
    """The reader, after it has read the pictures of a request."""
    reader = MediaReader(ServeOptions(**options), read_image)
    asyncio.run(reader.read(given))
    return reader


def test_pictures_of_messages_are_read_in_their_places():
    text = {"type": "text", "text": URL}
    given = chat(
        text,
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": URL},
    )
    reader = read(given)
    found = given.body.messages[1]["content"]
    assert found[0] == text
    pictures = [found[1]["image_url"]["url"], found[2]["image_url"], found[3]["image_url"], found[4]["image"]]
    keys = ["image_url", "image_url", "image_url", "image"]
    assert [each.text for each in pictures] == [
        f"messages[1]['content'][{i}]['{key}']" for i, key in enumerate(keys, 1)
    ]
    assert given.has_pictures and given.is_long and reader.num_open_bytes == given.num_picture_bytes == 4 * 28
    reader.release(given)
    assert reader.num_open_bytes == 0


def test_pictures_of_prompts_are_read_in_their_places():
    given = asked(InferenceBody, token_ids=[5], multi_modal_data={"image": URL})
    read(given)
    assert given.body.multi_modal_data["image"][0].text == "multi_modal_data['image'][0]"
    given = asked(GenerateBody, text="a", image_data=TEXT)
    read(given)
    assert given.body.image_data.text == "image_data"
    given = asked(GenerateBody, text="a", image_data=[[URL, {"url": TEXT, "detail": "auto"}], None, [], URL])
    read(given)
    (first, second), *others, last = given.body.image_data
    assert [first.text, second.text, others, last.text] == [
        "image_data[0][0]",
        "image_data[0][1]",
        [None, []],
        "image_data[3]",
    ]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (chat({"type": "image", "image": "/etc/passwd"}), "messages[1]['content'][0]['image']"),
        (chat({"type": "image_url", "image_url": {"url": None}}), "messages[1]['content'][0]['image_url']"),
        (chat({"type": "image", "image": {"bytes": TEXT}}), "messages[1]['content'][0]['image']"),
        (chat({"type": "input_image", "file_id": "a"}), "messages[1]['content'][0]['file_id']"),
        (chat({"type": "image", "image": URL, "min_pixels": 9}), "messages[1]['content'][0]['min_pixels']"),
        (
            chat({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}),
            "messages[1]['content'][0]['image_url']['detail']",
        ),
        (asked(InferenceBody, token_ids=[5], multi_modal_data={"image": [URL, TEXT]}), "multi_modal_data['image'][1]"),
        (asked(InferenceBody, token_ids=[5], multi_modal_data={"image": {"url": URL}}), "multi_modal_data['image'][0]"),
        (asked(InferenceBody, token_ids=[5], multi_modal_data={"audio": [URL]}), "multi_modal_data"),
        (asked(GenerateBody, text="a", image_data=[[URL, 5]]), "image_data[0][1]"),
        (asked(GenerateBody, text="a", image_data="/etc/passwd"), "image_data"),
        (asked(GenerateBody, text="a", image_data=[URL] * 1025), "image_data[1024]"),
    ],
)
def test_what_names_no_picture_is_refused_by_its_place(given, field):
    with pytest.raises(RequestError) as refusal:
        read(given)
    assert refusal.value.field == field


def test_texts_of_other_routes_are_left_alone():
    assert sources_of(None) == [] == sources_of(GenerateBody(text=URL))
    assert sources_of(ChatBody(messages=["text", {"role": "user"}, {"content": [URL, {"type": ["image"]}]}])) == []


def test_pictures_that_are_too_long_or_too_many_are_refused():
    with pytest.raises(HttpProblem) as long:
        read(chat({"type": "image", "image": URL}), max_picture_bytes=6)
    assert long.value.status == 413 and long.value.field == "messages[1]['content'][0]['image']"
    given = chat(*[{"type": "image", "image": URL}] * 2)
    with pytest.raises(HttpProblem) as many:
        read(given, max_open_picture_bytes=40)
    assert many.value.status == 413
    reader = MediaReader(ServeOptions(max_open_picture_bytes=40), read_image)
    asyncio.run(reader.read(chat({"type": "image", "image": URL})))
    with pytest.raises(HttpProblem) as busy:
        asyncio.run(reader.read(chat({"type": "image", "image": URL})))
    assert busy.value.status == 503
    with pytest.raises(RequestError, match=r"must be at most 1 pictures in one prompt"):
        asyncio.run(MediaReader(ServeOptions(), read_image, 1).read(chat(*[{"type": "image", "image": URL}] * 2)))


def test_a_turn_to_process_lasts_as_long_as_its_thread(monkeypatch, caplog):
    """A client that leaves frees no turn: else clients that leave could begin any number of threads."""
    monkeypatch.setattr(reading.os, "cpu_count", lambda: 1)
    go_on, begun = threading.Event(), []

    def work(data, field):
        begun.append(field)
        is_left = len(begun) < 3
        go_on.wait(30)
        if is_left:
            raise RequestError("a damaged picture")
        return read_image(data, field)

    async def run():
        reader = MediaReader(ServeOptions(), work)
        for i in range(6):
            task = asyncio.ensure_future(reader.read(chat({"type": "image", "image": URL})))
            while len(begun) < min(i + 1, 2):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            task.cancel()
        last = asyncio.ensure_future(reader.read(chat({"type": "image", "image": URL})))
        await asyncio.sleep(0.05)
        assert len(begun) == 2 and not last.done()
        go_on.set()
        await last

    asyncio.run(run())
    gc.collect()
    assert len(begun) == 3 and not caplog.records  # asyncio logs errors that no task has read


def test_a_model_without_a_tower_refuses_pictures_before_they_are_downloaded(client, monkeypatch):
    monkeypatch.setattr(reading, "download", None)
    for url in (URL, "http://images.example.org/a.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        error = client.problem("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
        assert error["param"] == "messages[0]['content'][0]['image_url']" and "takes no pictures" in error["message"]
    assert "takes no pictures" in client.problem("/generate", {"text": "a", "image_data": TEXT})["message"]
