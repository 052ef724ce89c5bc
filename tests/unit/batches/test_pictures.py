"""Pictures stay with their sequences, in batches of either layout and in files."""

import io
import json
import os
import random
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import NonTensorStack
from transformers import AutoImageProcessor

from rollout_engine import RequestError, concat, minibatches, read_jsonl, to_jsonl, to_trl
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.pictures import EncodedPicture, Picture, PlacedPicture
from rollout_engine.batches.json_values import json_value
from rollout_engine.batches.jsonl import samples
from rollout_engine.batches.output_samples import output_samples
from rollout_engine.batches.picture_files import damaged_pictures, load_picture, placed_pictures
from rollout_engine.batches.picture_images import png_of
from rollout_engine.batches.rewards import RewardCaller
from rollout_engine.batches.rollout_batch import rollout_batch
from rollout_engine.batches.trl import to_trl_rollout
from rollout_engine.looking.page import page_data
from rollout_engine.testing.tiny_pictures import FAMILIES, random_picture
from tests.unit.batches.conftest import PAD, completion

LAYOUTS = ["padded", "packed"]
ROWS = np.zeros((2, 4), np.float32), []


def picture(seed):
    return Picture.of({"pixel_values": np.random.default_rng(seed).random((1, 3, 4, 6), np.float32)})


def outputs(seed, counts=(1, 0, 2)):
    """Prompts with these numbers of pictures, of 2 samples each; the first picture of all prompts is the same."""
    rng, made = random.Random(seed), []
    for index, count in enumerate(counts):
        placed = [PlacedPicture(3 * i + 1, 3 * i + 3, picture(100 * index + i if i else 7)) for i in range(count)]
        answers = [completion(rng, each, rng.randrange(1, 6), False) for each in range(2)]
        ids = [rng.randrange(90) for _ in range(9)]
        made.append(RequestOutput(str(index), f"prompt {index}", ids, None, answers, True, 0, pictures=placed))
    return made


def batch_of(seed=0, layout="padded", counts=(1, 0, 2)):
    return rollout_batch(outputs(seed, counts), pad_token_id=PAD, layout=layout)


def spans(rows):
    return [[(each.start, each.end, each.picture.digest) for each in row] for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sample_has_the_pictures_of_its_prompt(layout):
    batch = batch_of(layout=layout)
    rows = list(batch["pictures"])
    assert [len(row) for row in rows] == [1, 1, 0, 0, 2, 2]
    assert rows[0][0] is rows[1][0] and rows[4][1].picture is rows[5][1].picture
    assert "pictures 6, 2 of them different" in repr(batch)
    assert "pictures" not in batch_of(counts=(0, 0), layout=layout).keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_keep_the_pictures_of_their_rows(layout):
    first, second = batch_of(1, layout), batch_of(2, layout, counts=(0, 0))
    joined = concat([first, second])
    whole = spans(joined["pictures"])
    assert whole == [*spans(first["pictures"]), [], [], [], []]
    order = torch.Generator().manual_seed(5)
    parts = [part for part in minibatches(joined, 3, generator=order)]
    texts = [text for part in parts for text in part["text", "response"]]
    rows = [list(joined["text", "response"]).index(text) for text in texts]
    assert [row for part in parts for row in spans(part["pictures"])] == [whole[row] for row in rows]
    if layout == "padded":
        assert spans(joined[torch.tensor([5, 0])]["pictures"]) == [whole[5], whole[0]]
        assert spans(joined[joined["group_id"] == 2]["pictures"]) == whole[4:6]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_give_the_same_pictures_again(layout, tmp_path):
    batch = batch_of(layout=layout)
    to_jsonl(batch, tmp_path / "a.jsonl")
    to_jsonl(batch, tmp_path / "a.jsonl", append=True)
    read, known = read_jsonl(tmp_path / "a.jsonl"), {}
    assert [spans([placed_pictures(sample, known)])[0] for sample in read] == 2 * spans(batch["pictures"])
    assert len(known) == len(list((tmp_path / "pictures").glob("*.npz"))) == 2
    for digest, found in known.items():
        with np.load(tmp_path / "pictures" / f"{digest}.npz", allow_pickle=False) as arrays:
            assert np.array_equal(arrays["pixel_values"], found.arrays["pixel_values"])
        assert found.arrays["pixel_values"].flags.writeable
    assert "pictures" not in read[2]


def test_a_groups_lines_are_those_of_its_batch():
    [output] = outputs(3, counts=(2,))
    of_batch = list(samples(rollout_batch([output], pad_token_id=PAD)))
    of_output = list(output_samples(output, 0, {}, None, {}))
    assert of_batch == of_output and of_batch[0]["pictures"][1]["picture"] is output.pictures[1].picture


def test_a_stream_without_a_folder_is_refused():
    with pytest.raises(RequestError, match="must be the name of a file.*exclude"):
        to_jsonl(batch_of(), io.StringIO())
    stream = io.StringIO()
    to_jsonl(batch_of().exclude("pictures"), stream)
    assert len(stream.getvalue().splitlines()) == 6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trl_gets_pictures_in_the_form_of_its_loss(layout):
    batch = batch_of(layout=layout)
    inputs = to_trl(batch)
    assert inputs["num_images"] == [1, 1, 0, 0, 2, 2] and inputs["pixel_values"].shape == (6, 3, 4, 6)
    expected = [each.picture.arrays["pixel_values"][0] for row in batch["pictures"] for each in row]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(inputs["pixel_values"], expected, strict=True))
    types, ids = inputs["mm_token_type_ids"], torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    assert types.shape == ids.shape and types[2:4].sum() == 0
    start = inputs["prompt_ids"].shape[1] - 9  # prompts have 9 tokens
    spans_of = {0: [(1, 3)], 1: [(1, 3)], 4: [(1, 3), (4, 6)], 5: [(1, 3), (4, 6)]}
    for row, own in spans_of.items():
        marked = set((types[row].nonzero()[:, 0] - start).tolist())
        # Features stand where the token is that of the span's first place.
        same = {i for a, b in own for i in range(a, b) if ids[row, start + i] == ids[row, start + a]}
        assert marked == same and len(same) >= len(own)


def test_trl_gets_late_pictures_in_its_loss_alone():
    assert set(to_trl(batch_of().exclude("pictures"))) == set(to_trl(batch_of(counts=(0, 0, 0))))
    assert len(to_trl_rollout(batch_of())["prompt_ids"]) == 6
    late = batch_of()
    late["num_prompt_tokens"] = torch.tensor([4] * 6)
    with pytest.raises(RequestError, match="later turns"):
        to_trl_rollout(late)


def test_features_stay_with_their_pictures_and_are_in_no_file(tmp_path):
    batch, plain = batch_of(1), batch_of(2, counts=(0, 0))
    digests = [[each.picture.digest for each in row] for row in batch["pictures"]]
    features = [tuple(EncodedPicture(digest, "", "float32", *ROWS) for digest in row) for row in digests]
    batch["picture_features"] = NonTensorStack(*features)
    joined = concat([batch, plain])
    assert list(joined["picture_features"]) == [*features, (), (), (), ()]
    for part in minibatches(joined, 4):
        for shown, found in zip(part["pictures"], part["picture_features"], strict=True):
            assert [each.picture.digest for each in shown] == [each.digest for each in found]
    with pytest.raises(RequestError, match="picture_features"):
        concat([batch, batch_of(3)])
    to_jsonl(joined, tmp_path / "a.jsonl")
    assert all("picture_features" not in {*sample, *sample["columns"]} for sample in read_jsonl(tmp_path / "a.jsonl"))


class Trap:
    """Ends the process of whoever unpickles it."""

    def __reduce__(self):
        return os._exit, (1,)


def npz(name, **arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def claiming(shape):
    """An array file whose header claims another shape than its content has."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pixel_values.npy", header.getvalue() + bytes(64))
    return content.getvalue()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file"),
        (b"", "not a zip file"),
        (b"\x80\x04K\x01.", "not a zip file"),
        (npz("a", pixel_values=np.array([Trap()], object)), "no plain array of numbers"),
        (npz("a", pixel_values=np.asfortranarray(np.zeros((2, 3)))), "no plain array"),
        (npz("a", pixel_values=np.zeros(3)), "it was changed, or renamed"),
        (npz("a", **{f"a{i}": np.zeros(1) for i in range(17)}), "more than 16 arrays"),
        (claiming((1 << 40, 1 << 20)), "not those of an array"),
        (claiming((-16,)), "not those of an array"),
        (npz("a", pixel_values=np.zeros(300))[:-90], "not a zip file"),
    ],
)
def test_a_strange_file_is_refused(content, message, tmp_path):
    name = "ab" * 16
    if content is not None:
        (tmp_path / f"{name}.npz").write_bytes(content)
    with pytest.raises(RequestError, match=message):
        load_picture(tmp_path, name)


@pytest.mark.parametrize("name", ["../" + "a" * 29, "a" * 31, "A" * 32, ""])
def test_a_picture_is_named_by_a_digest_alone(name, tmp_path):
    with pytest.raises(RequestError, match="32 hexadecimal digits"):
        load_picture(tmp_path, name)
    to_jsonl(batch_of(), tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    lines[0]["pictures"][0]["picture"] = name
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(RequestError, match="b.jsonl:1.*not spans"):
        read_jsonl(tmp_path / "b.jsonl")


def test_patches_of_gemma4_and_the_whole_tile_of_llava_next_are_shown(tmp_path):
    for family, width, height in (("gemma4", 80, 56), ("llava_next", 16, 16)):  # 70 features of 8 x 8; one tile
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(FAMILIES[family].images))
        processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
        image = random_picture(3, width, height)
        made = processor(image, return_tensors="np")
        names = ("pixel_values", "image_position_ids", "image_sizes")
        found = Picture.of({name: np.asarray(made[name]) for name in names if name in made})
        shown = np.asarray(Image.open(io.BytesIO(png_of(found))))
        assert np.array_equal(shown, np.asarray(image)), family


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl"])
def test_an_image_of_the_size_that_a_tower_takes_is_shown_as_it_was(family, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FAMILIES[family].images))
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    size = processor.size
    image = random_picture(3, size.get("width", 32), size.get("height", 24))
    made = processor(image, return_tensors="np")
    arrays = {name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw") if name in made}
    features = int(np.prod(arrays["image_grid_thw"])) // 4 if "image_grid_thw" in arrays else None
    shown = Image.open(io.BytesIO(png_of(Picture.of(arrays), features)))
    assert np.array_equal(np.asarray(shown), np.asarray(image))


def test_pages_hold_the_pictures_of_prompts_and_messages(tmp_path):
    batch = batch_of()
    in_memory = page_data(samples(batch), "title", lambda token_id: None)
    to_jsonl(batch, tmp_path / "a.jsonl")
    read = page_data(read_jsonl(tmp_path / "a.jsonl"), "title", lambda token_id: None)
    assert read == in_memory and len(read["pictures"]) == 2
    assert set(read["samples"][4]["pictures"]) == set(read["pictures"])
    assert all(url.startswith("data:image/png;base64,iVBOR") for url in read["pictures"].values())
    for file in (tmp_path / "pictures").glob("*.png"):
        file.write_bytes(b"<svg onload=alert(1)>")
    assert "pictures" not in page_data(read_jsonl(tmp_path / "a.jsonl"), "title", lambda token_id: None)


def test_a_damaged_file_of_a_picture_is_named_where_it_is_shown(tmp_path, caplog):
    to_jsonl(batch_of(), tmp_path / "a.jsonl")
    read = read_jsonl(tmp_path / "a.jsonl")
    assert damaged_pictures(read) == {}
    shared, other = read[0]["pictures"][0]["picture"], read[4]["pictures"][1]["picture"]
    folder = tmp_path / "pictures"
    (folder / f"{other}.npz").write_bytes((folder / f"{shared}.npz").read_bytes())
    problems = damaged_pictures(read)
    assert list(problems) == [other] and f"{other}.npz" in problems[other]
    assert f"Its arrays are those of {shared}: it was changed, or renamed." in problems[other]
    page = page_data(read, "title", lambda token_id: None)
    assert page["damaged"] == problems and set(page["pictures"]) == {shared}
    assert [record.message for record in caplog.records] == [problems[other]]
    (folder / f"{shared}.npz").unlink()
    assert set(damaged_pictures(read)) == {shared, other} and "No such file" in damaged_pictures(read)[shared]
    assert damaged_pictures(read, most_bytes=0).keys() == {shared}, "no file is read beyond the bound"


def test_a_notebook_shows_pictures():
    assert batch_of(counts=(1, 0))._repr_html_().count("<img src='data:image/png;base64,iVBOR") == 2


def test_a_picture_of_a_message_is_written_as_its_digest():
    held = picture(1)
    messages = [{"role": "user", "content": [{"type": "image", "image": held}]}]
    assert json_value(messages)[0]["content"][0]["image"] == held.digest.hex()


def test_rewards_get_the_pictures_and_share_the_images():
    seen = {}

    def reward(prompts, completions, pictures):
        seen.update(prompts=prompts, pictures=pictures)
        return [0.0] * len(completions)

    [output] = outputs(4, counts=(2,))
    image = Image.new("RGB", (2, 2))
    prompt = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}]}]
    caller = RewardCaller(reward)
    caller.check_columns([])
    assert caller.start(0, prompt, output, {}).result().total == [0.0, 0.0]
    assert seen["pictures"] == [tuple(output.pictures)] * 2
    assert [given[0]["content"][0]["image"] for given in seen["prompts"]] == [image, image]
    assert all(given[0]["content"][0]["image"] is image for given in seen["prompts"])
    assert seen["prompts"][0] is not seen["prompts"][1] and seen["prompts"][0] is not prompt
    [output] = outputs(4, counts=(0,))
    assert caller.start(0, "text", output, {}).result().total == [0.0, 0.0]
    assert seen["pictures"] == [(), ()]
