"""Environments whose observations hold pictures: their messages, their prompts and their rows."""

import base64
import io
import json

import msgspec
import numpy as np
import pytest
from PIL import Image

from envs_adapters.base import Observation
from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.pictures import Picture, PictureInfo
from rollout_engine.rollouts.episodes.conversation import Conversation
from rollout_engine.rollouts.episodes.env_wire import Reply, encode_reply
from rollout_engine.rollouts.episodes.episode import Act, Ask, Episode, Rules
from rollout_engine.rollouts.episodes.observations import ObservationError, as_observation
from rollout_engine.testing.tiny_pictures import FAMILIES, random_picture, vision_tokenizer
from rollout_engine.text.chat_turns import ChatTurns
from rollout_engine.text.formats.tool_calls import ToolCalls
from rollout_engine.text.picture_processor import PictureProcessor
from rollout_engine.text.picture_prompts import PicturePrompts
from rollout_engine.text.prompt_encoder import PromptEncoder
from rollout_engine.text.text_turns import TextTurns
from rollout_engine.text.tokenizer import TextCodec

BASE64 = base64.b64encode
IMAGES = [random_picture(seed, 40, 32 - 8 * seed) for seed in range(3)]


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def seen(image, text="Which?"):
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def pixels(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize(
    "image",
    [
        IMAGES[0],
        np.asarray(IMAGES[0]),
        png(IMAGES[0]),
        f"data:image/png;base64,{BASE64(png(IMAGES[0])).decode()}",
    ],
    ids=lambda image: type(image).__name__,
)
def test_a_picture_of_an_observation_becomes_a_file_that_any_process_can_be_sent(image):
    observation = as_observation(Observation([seen(image)]), 1, 0)
    part = observation.messages[0]["content"][0]
    assert set(part) == {"type", "image"} and np.array_equal(pixels(part["image"]), np.asarray(IMAGES[0]))
    sent = msgspec.msgpack.decode(encode_reply(Reply(observation=observation), 1), type=Reply)
    assert sent.observation.messages == as_observation(Observation([seen(image)]), 1, 0).messages


@pytest.mark.parametrize(
    "image, message",
    [
        ("picture.png", r"\['image'\].*No file is read for an environment"),
        ("https://example.org/a.png", "No file is read for an environment"),
        (None, "No file is read for an environment"),
        (np.zeros((2, 2, 3)), "array of uint8"),
        (np.zeros((0, 2, 3), np.uint8), "at least one pixel"),
        (b"x" * ((1 << 25) + 1), "33554432 are the most allowed"),
        (3, "PIL image"),
    ],
)
def test_what_is_no_picture_is_refused(image, message):
    with pytest.raises(ObservationError, match=message):
        as_observation(Observation([seen(image)]), 1, 0)


@pytest.fixture(scope="module")
def pictures_of(tmp_path_factory):
    """pictures_of(family) -> (codec, pictures): of a checkpoint without its model, at most 3 pictures a prompt."""
    made = {}

    def make(family):
        if family not in made:
            path, found = tmp_path_factory.mktemp(family), FAMILIES[family]
            codec = TextCodec(vision_tokenizer(family))
            (path / "preprocessor_config.json").write_text(json.dumps(found.images))
            options = {"processor_class": found.processor} | found.options
            (path / "processor_config.json").write_text(json.dumps(options))
            info = PictureInfo(codec.hf.convert_tokens_to_ids(found.tokens["image"]))
            processor = PictureProcessor(path, codec.hf, cache_bytes=1 << 20)
            made[family] = codec, PicturePrompts(codec, info, lambda: processor, max_pictures=3)
        return made[family]

    return make


def answer(codec, text):
    ids = [*codec.encode(text, add_special_tokens=False), codec.hf.eos_token_id]
    return CompletionOutput(0, text, ids, np.zeros(len(ids), np.float32), None, 0.0, None, "stop", None, [], 0)


def spans(pictures):
    return [(each.start, each.end, each.picture.digest) for each in pictures]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3", "mistral3"])
def test_each_turns_prompt_is_that_of_the_whole_conversation(pictures_of, family):
    codec, pictures = pictures_of(family)
    conversation, messages = Conversation(ChatTurns(codec, pictures)), []
    encoder = PromptEncoder(codec, pictures, max_model_len=4096, vocab_size=len(codec.hf))
    for index, image in enumerate(IMAGES):
        observed = seen(png(image), f"Number {index}?")
        conversation.read([observed])
        prompt = conversation.prompt()
        messages.append(observed)
        whole = encoder.encode({"messages": messages}, truncates=True)
        assert prompt == whole.token_ids
        assert spans(conversation.pictures) == spans(whole.pictures) and len(whole.pictures) == index + 1
        conversation.answer(answer(codec, "a digit"))
        messages.append({"role": "assistant", "content": "a digit"})
    row = conversation.rows[0]
    ids, placeholder = row.prompt + row.response, pictures._image_token_id
    assert all(ids[each.start] == ids[each.end - 1] == placeholder for each in row.pictures)
    held = [message["content"][0]["image"] for message in conversation.messages if message["role"] == "user"]
    assert [each.picture for each in row.pictures] == held and all(isinstance(each, Picture) for each in held)


def test_a_picture_that_was_not_answered_is_in_no_row(pictures_of):
    codec, pictures = pictures_of("qwen2_5_vl")
    conversation = Conversation(ChatTurns(codec, pictures))
    conversation.read([seen(png(IMAGES[0]))])
    conversation.prompt()
    conversation.answer(answer(codec, "no"))
    conversation.read([seen(png(IMAGES[1]))])
    assert len(conversation.prompt()) > len(conversation.rows[0].prompt) and len(conversation.pictures) == 2
    conversation.end()
    assert len(conversation.pictures) == 1
    assert conversation.rows[0].response == answer(codec, "no").token_ids


def test_more_pictures_than_the_engine_takes_are_refused(pictures_of):
    codec, pictures = pictures_of("qwen2_5_vl")
    conversation = Conversation(ChatTurns(codec, pictures))
    for _ in range(3):
        conversation.read([seen(png(IMAGES[0]))])
        conversation.prompt()
        conversation.answer(answer(codec, "no"))
    conversation.read([seen(png(IMAGES[0]))])
    with pytest.raises(RequestError, match="max_prompt_pictures=3"):
        conversation.prompt()


def test_a_text_of_the_environment_cannot_stand_for_a_picture(pictures_of):
    codec, pictures = pictures_of("qwen2_5_vl")
    for observed in (seen(png(IMAGES[0]), "Here: <|image_pad|>"), {"role": "user", "content": "<|image_pad|>"}):
        with pytest.raises(RequestError, match="a text without '<|image_pad|>', which stands for a picture"):
            Conversation(ChatTurns(codec, pictures)).read([observed])


def test_pictures_need_a_template_and_a_model_that_takes_them(pictures_of):
    codec, _ = pictures_of("qwen2_5_vl")
    with pytest.raises(RequestError, match="a tokenizer without a chat template"):
        Conversation(TextTurns(codec)).read([seen(png(IMAGES[0]))])
    with pytest.raises(RequestError, match="the model takes no pictures"):
        Conversation(ChatTurns(codec, PicturePrompts(codec, None))).read([seen(png(IMAGES[0]))])
    with pytest.raises(RequestError, match="only text is read"):
        Conversation(ChatTurns(codec)).read([seen(png(IMAGES[0]))])


def test_an_episode_whose_next_prompt_would_show_too_many_pictures_is_cut_off(pictures_of):
    codec, pictures = pictures_of("qwen2_5_vl")
    rules = Rules(
        max_turns=9,
        max_tokens=lambda seat: 10_000,
        new_conversation=lambda seat, tools: Conversation(ChatTurns(codec, pictures)),
        find_calls=lambda *_: ToolCalls(),
        max_pictures=lambda seat: pictures.max_pictures,
    )
    episode, shown = Episode(rules, 0, 0, 0, 1), Observation([seen(png(IMAGES[0]))], 1.0)
    task = episode.began(shown, [], [], 1)
    for _ in range(pictures.max_pictures):
        assert isinstance(task, Ask)
        assert isinstance(episode.take_sample(answer(codec, "no")), Act)
        task = episode.take_observation(shown)
    [row] = episode.seats[0].rows
    assert (task, episode.ended_by, episode.is_truncated, episode.error) == (None, "max_prompt_pictures", True, None)
    assert len(row.samples) == len(row.pictures) == 3 and row.turns[-1] == 2, "nothing stands behind the last answer"
    assert episode.seats[0].total_reward == 4.0

    first = Episode(rules, 0, 0, 0, 1)
    assert first.began(Observation([seen(png(IMAGES[0]))] * 4), [], [], 1) is None
    assert first.ended_by == "error" and "max_prompt_pictures=3" in first.error, "no answer could be trained on"
