"""Prompts with pictures: their token ids, places and arrays are those of transformers' own processor."""

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.smolvlm import processing_smolvlm

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture, PictureInfo, PlacedPicture
from rollout_engine.testing import random_picture, tiny_vision_checkpoint
from rollout_engine.testing.tiny_pictures import FAMILIES
from rollout_engine.text.input_processor import InputProcessor
from rollout_engine.text.tokenizer import TextCodec

SIZES = ((40, 32), (17, 60), (64, 64), (8, 9))
TEXT_NAMES = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Make each family's checkpoint once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tiny_vision_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def inputs_of(path, unsupported_reason="", **options) -> InputProcessor:
    """The input processor of an engine that serves pictures."""
    config = transformers.AutoConfig.from_pretrained(path)
    info = PictureInfo(config.image_token_id, unsupported_reason)
    sizes = SimpleNamespace(
        max_model_len=1024, vocab_size=272, eos_token_ids=[2], generates=True, pooling=None, routing=None, pictures=info
    )
    return InputProcessor.from_config(EngineConfig(model=str(path), **options), TextCodec.from_pretrained(path), sizes)


@pytest.fixture
def qwen(checkpoint):
    return inputs_of(checkpoint("qwen3_vl"))


def reference(path, family, monkeypatch):
    """Transformers' processor, with its own class and no part for videos."""
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    if family == "mistral3":  # its module asks torchvision for one function that images do not need
        absent = types.ModuleType("absent")
        absent.get_resize_output_image_size = None
        monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", absent)
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor as base
    else:
        base = getattr(transformers, FAMILIES[family].processor)
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: object)
    options, _ = ProcessorMixin.get_processor_dict(path)
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(path),
    }
    return base.from_args_and_dict([parts.get(name) for name in base.get_attributes()], options)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"kimi_k25"}))  # whose class needs torchvision
def test_ids_places_and_arrays_are_those_of_transformers(checkpoint, family, monkeypatch):
    path = checkpoint(family)
    inputs, processor = inputs_of(path), reference(path, family, monkeypatch)
    images = [random_picture(i, *size) for i, size in enumerate(SIZES)]
    content = [{"type": "text", "text": "Compare "}, *({"type": "image", "image": each} for each in images[:2])]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*content, {"type": "text", "text": "\n\nand"}]},
        {"role": "assistant", "content": "What else?"},
        {"role": "user", "content": [{"type": "image", "image": each} for each in images[2:]]},
    ]
    checked = inputs.check({"messages": messages}, None)

    shown = [
        {
            **m,
            "content": m["content"] if isinstance(m["content"], str) else [{**p, "image": None} for p in m["content"]],
        }
        for m in messages
    ]
    text = processor.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    made = processor(text=[text], images=images, return_tensors="np")
    assert checked.text == text
    assert checked.token_ids == made["input_ids"][0].tolist()

    image_token_id = transformers.AutoConfig.from_pretrained(path).image_token_id
    covered = np.zeros(len(checked.token_ids), bool)
    for placed, image in zip(checked.pictures, images, strict=True):
        covered[placed.start : placed.end] = True
        alone = processor(text=[processor.image_token], images=[image], return_tensors="np")
        ids = alone["input_ids"][0].tolist()
        first, last = ids.index(image_token_id), len(ids) - ids[::-1].index(image_token_id)
        assert checked.token_ids[placed.start : placed.end] == ids[first:last]
        arrays = {name: value for name, value in alone.items() if name not in TEXT_NAMES}
        assert set(placed.picture.arrays) == set(arrays)
        for name, value in arrays.items():
            found = placed.picture.arrays[name]
            assert found.dtype == value.dtype and np.array_equal(found, value), name
    assert all(covered[i] for i, each in enumerate(checked.token_ids) if each == image_token_id)
    assert inputs.admit(checked).pictures == list(checked.pictures)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3", "idefics3", "internvl"])
def test_texts_and_ids_take_images_beside_them_expanded_or_not(checkpoint, family):
    inputs = inputs_of(checkpoint(family))
    placeholder = inputs.pictures.processor.placeholder
    images = [random_picture(i, *size) for i, size in enumerate(SIZES[:2])]
    text, data = f"One {placeholder} two {placeholder} three", {"multi_modal_data": {"image": images}}
    of_text = inputs.check({"prompt": text, **data}, None)
    short = inputs.codec.encode(text)
    unexpanded = inputs.check({"prompt_token_ids": short, **data}, None)
    expanded = inputs.check({"prompt_token_ids": of_text.token_ids, **data}, None)
    placed = inputs.check({"prompt_token_ids": of_text.token_ids, "pictures": of_text.pictures}, None)
    ids, places = inputs.pictures.expand_ids(short, [each.picture for each in of_text.pictures])
    for other in (unexpanded, expanded, placed, of_text._replace(token_ids=ids, pictures=places)):
        assert other.token_ids == of_text.token_ids
        assert [(each.start, each.end, each.picture.digest) for each in other.pictures] == [
            (each.start, each.end, each.picture.digest) for each in of_text.pictures
        ]
    assert len(of_text.token_ids) > len(short)


def test_one_picture_given_as_a_message_or_beside_it_is_the_same(qwen):
    image = random_picture(5)
    inline = qwen.check([{"role": "user", "content": [{"type": "image", "image": image}]}], None)
    part = {"type": "image", "image": None, "text": None}  # as a dataset has it
    beside = qwen.check({"messages": [{"role": "user", "content": [part]}], "multi_modal_data": {"image": image}}, None)
    read = qwen.read_images({"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}]})
    assert inline.token_ids == beside.token_ids == qwen.check(read, None).token_ids
    pictures = [each.pictures[0].picture for each in (inline, beside, qwen.check(read, None))]
    assert pictures[0] is pictures[1] is pictures[2], "an image that was read is kept"


def test_a_small_cache_forgets_pictures_and_changes_none(checkpoint):
    for cache_bytes in (0, 70_000):
        inputs = inputs_of(checkpoint("qwen3_vl"), mm_cache_bytes=cache_bytes)
        first = inputs.read_image(random_picture(0)).picture
        assert (inputs.read_image(random_picture(0)).picture is first) == (cache_bytes > 0)
        for seed in range(1, 9):
            inputs.read_image(random_picture(seed))
        again = inputs.read_image(random_picture(0)).picture
        assert again is not first and again.digest == first.digest
    with pytest.raises(RequestError, match="a picture that was read here"):
        inputs.read_image(Picture.of({"pixel_values": np.zeros((4, 96), np.float32)}))


PAD = "<|image_pad|>"
PICTURE = {"type": "image", "image": random_picture(0)}
ONE = random_picture(0)


def user(*parts, **more):
    return {"messages": [{"role": "user", "content": list(parts)}], **more}


def text(words):
    return {"type": "text", "text": words}


BAD = {
    "a placeholder in a text": (user(text(f"See {PAD}")), "messages[0]['content'][0]['text']", "stands for a picture"),
    "one beside a picture": (user(PICTURE, text(PAD)), "messages[0]['content'][1]['text']", "stands for a picture"),
    "in a variable": (
        user(PICTURE, chat_template_kwargs={"note": PAD}),
        "chat_template_kwargs['note']",
        "stands for a picture",
    ),
    "in a prompt": ({"prompt": f"a {PAD}"}, "prompt", "stands for a picture"),
    "fewer pictures": ({"prompt": PAD * 2, "multi_modal_data": {"image": [ONE]}}, "prompt", "the text has 2"),
    "more pictures": ({"prompt": PAD, "multi_modal_data": {"image": [ONE, ONE]}}, "prompt", "the text has 1"),
    "fewer for ids": (
        {"prompt_token_ids": [5, 261, 261], "multi_modal_data": {"image": [ONE]}},
        "prompt_token_ids",
        "as many as pictures (id 261): 1, or expanded: 20",
    ),
    "none for ids": (
        {"prompt_token_ids": [5], "multi_modal_data": {"image": [ONE]}},
        "prompt_token_ids",
        "placeholders: 0",
    ),
    "no image": (user({"type": "image"}), "messages[0]['content'][0]['image']", "an image, or one more"),
    "one too many": (
        user(PICTURE, multi_modal_data={"image": [ONE]}),
        "multi_modal_data['image'][0]",
        "no more pictures without an image",
    ),
    "broken": (user(text("a"), {"type": "image", "image": b"x"}), "messages[0]['content'][1]['image']", "PNG"),
    "a URL": (
        user({"type": "image_url", "image_url": {"url": "https://host/a.png"}}),
        "messages[0]['content'][0]['image_url']",
        "a data URL",
    ),
    "a path as URL": (
        user({"type": "image_url", "image_url": {"url": "/etc/hostname"}}),
        "messages[0]['content'][0]['image_url']",
        "a data URL",
    ),
    "less detail": (
        user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}),
        "messages[0]['content'][0]['image_url']['detail']",
        "'auto', 'high' or left out",
    ),
    "another key": (user({"type": "image", "url": "a"}), "messages[0]['content'][0]['url']", "as 'image'"),
    "a processor's option": (
        user(PICTURE | {"min_pixels": 3}),
        "messages[0]['content'][0]['min_pixels']",
        "files alone set how",
    ),
    "too many": ({"prompt": PAD * 9, "multi_modal_data": {"image": [ONE] * 9}}, "multi_modal_data['image'][0]", "=8"),
    "a video": ({"prompt": "a", "multi_modal_data": {"video": [ONE]}}, "multi_modal_data", "as images"),
    "audio": (user({"type": "input_audio", "input_audio": {}}), "messages[0]['content'][0]['type']", "Audio is not"),
    "too long": (
        {"prompt": PAD, "multi_modal_data": {"image": [Image.new("RGB", (4000, 15))]}},
        "multi_modal_data['image'][0]",
        "200 times",
    ),
    "no data": ({"prompt": PAD, "multi_modal_data": [ONE]}, "multi_modal_data", "a dict"),
    "both": ({"prompt_token_ids": [5], "pictures": [], "multi_modal_data": {}}, "pictures", "prompt_token_ids"),
}


@pytest.mark.quick(14)
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_one_image_for_each_placeholder_is_refused_by_its_part(qwen, name):
    prompt, field, words = BAD[name]
    with pytest.raises(RequestError) as caught:
        qwen.check(prompt, None)
    assert caught.value.field == field and words in str(caught.value)


def test_an_observation_with_a_placeholder_is_refused(qwen):
    qwen.pictures.check_messages([{"role": "user", "content": [PICTURE, text("a")]}])
    with pytest.raises(RequestError, match=r"messages\[0\]\['content'\]='<|image_pad|>' is not allowed"):
        qwen.pictures.check_messages([{"role": "tool", "content": PAD}])


PIXELS = np.zeros((4, 96), np.float32)


@pytest.mark.parametrize(
    "made, words",
    [
        (lambda good: good, "a PlacedPicture"),
        (lambda good: PlacedPicture(1.0, 3, good), "a span of two ints"),
        (lambda good: PlacedPicture(None, 3, good), "a span of two ints"),
        (lambda good: PlacedPicture(1, 3, None), "a PlacedPicture"),
        (lambda good: PlacedPicture(1, 3, Picture(None, good.arrays)), "Picture.of"),
        (lambda good: PlacedPicture(1, 3, Picture(good.digest, None)), "Picture.of"),
        (lambda good: PlacedPicture(1, 3, Picture(good.digest, {"pixel_values": [1.0]})), "an array of float32"),
        (lambda good: PlacedPicture(1, 3, Picture.of({"pixel_values": PIXELS.astype(np.int64)})), "float32"),
        (lambda good: PlacedPicture(1, 3, Picture.of({"pixel_values": PIXELS.astype(np.float16)})), "float32"),
        (lambda good: PlacedPicture(1, 3, Picture.of({"grid": PIXELS.astype(np.complex64)})), "ints or bools"),
    ],
)
def test_what_is_no_placed_picture_is_refused(qwen, made, words):
    prompt = {"prompt_token_ids": [5, 261, 261, 6], "pictures": [made(qwen.read_image(ONE).picture)]}
    with pytest.raises(RequestError, match=words) as caught:
        qwen.check(prompt, None)
    assert caught.value.field.startswith("pictures[0]")


@pytest.mark.parametrize("span", [(1, 1), (0, 2), (1, 5), (2, 1), (1, 9)])
def test_places_that_are_none_are_refused(qwen, span):
    picture = qwen.read_image(ONE).picture
    with pytest.raises(RequestError, match=r"pictures\[0\]"):
        qwen.check({"prompt_token_ids": [5, 261, 261, 6, 7], "pictures": [PlacedPicture(*span, picture)]}, None)
    good = qwen.check({"prompt_token_ids": [5, 261, 261, 6], "pictures": [PlacedPicture(1, 3, picture)]}, None)
    assert good.pictures[0].picture is picture


def test_a_prompt_is_not_cut_within_a_picture(qwen):
    prompt = {"prompt": f"ab{PAD}cd{PAD}ef", "multi_modal_data": {"image": [ONE, random_picture(1)]}}
    whole = qwen.check(prompt, None)
    second = whole.pictures[1]
    kept = len(whole.token_ids) - second.start + 1
    cut = qwen.check(prompt, {"truncate_prompt_tokens": kept})
    assert [(each.start, each.end) for each in cut.pictures] == [(1, 1 + second.end - second.start)]
    assert cut.token_ids == whole.token_ids[-kept:]
    with pytest.raises(RequestError, match="keeps all of picture 1, tokens"):
        qwen.check(prompt, {"truncate_prompt_tokens": kept - 3})


def test_pictures_that_the_chat_template_leaves_out_are_missed(qwen):
    silent = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template, words in ((silent, "the chat template writes 0"), (plain, "Give a chat_template that shows")):
        with pytest.raises(RequestError, match=words):
            qwen.check(user(text("a"), PICTURE, chat_template=template), None)


def test_a_model_that_takes_no_pictures_refuses_them_in_a_sentence_and_serves_its_text(checkpoint):
    path = checkpoint("qwen3_vl")
    refusing = inputs_of(path, "Its tower is not exact.")
    with pytest.raises(RequestError, match=r"pictures are not served. Its tower is not exact\.") as caught:
        refusing.check(user(PICTURE), None)
    assert caught.value.field == "messages[0]['content'][0]['image']"
    assert refusing.check({"prompt": f"a {PAD}"}, None).token_ids[-1] == 261
    text_alone = InputProcessor(TextCodec.from_pretrained(path), max_model_len=64, vocab_size=272)
    with pytest.raises(RequestError, match="the model takes no pictures"):
        text_alone.check({"prompt": PAD, "multi_modal_data": {"image": ONE}}, None)


def test_ids_with_a_placeholder_and_no_picture_are_taken_with_a_warning(qwen, caplog):
    checked = qwen.check([5, 261, 6], None)
    assert checked.token_ids == [5, 261, 6] and not checked.pictures
    assert "has the id 261, which stands for a picture" in caplog.text


def test_a_processor_that_cannot_be_made_is_one_error(checkpoint, tmp_path):
    path = tiny_vision_checkpoint(tmp_path, "qwen3_vl")
    (path / "preprocessor_config.json").write_text("{")
    inputs = inputs_of(path)
    for _ in range(2):
        with pytest.raises(RequestError, match="the processor of this checkpoint cannot be made"):
            inputs.check(user(PICTURE), None)
    assert inputs.check("text", None).token_ids
