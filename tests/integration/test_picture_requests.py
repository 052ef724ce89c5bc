"""Prompts with pictures on the faces: every form gives the same tokens, and a bad one leaves others alone."""

import asyncio
import base64
import io
import re
import threading

import pytest

from rollout_engine import LLM, AsyncLLM, EngineConfig, RequestError, RolloutPolicy
from rollout_engine import SamplingParams as Params
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.testing import random_picture, tiny_vision_checkpoint
from rollout_engine.text.picture_prompts import PicturePrompts

OPTIONS = dict(num_kv_blocks=96, block_size=16, max_model_len=512, dtype="float32", log_stats=False)
GREEDY = Params(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
IMAGE = random_picture(3, 36, 28)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, **OPTIONS) as made:
        yield made


def ask(image, **kind):
    part = {"type": "image", "image": image} | kind
    return [{"role": "user", "content": [{"type": "text", "text": "What is "}, part]}]


def png() -> bytes:
    buffer = io.BytesIO()
    IMAGE.save(buffer, "PNG")
    return buffer.getvalue()


def facts(output):
    (sample,) = output.outputs
    assert sample.error is None, sample.error
    places = [(each.start, each.end, each.picture.digest) for each in output.pictures]
    return output.prompt_token_ids, places, sample.token_ids, sample.logprobs.tolist()


def test_every_form_of_a_prompt_and_face_gives_the_same_bits(llm, path, tmp_path):
    (tmp_path / "picture.png").write_bytes(png())
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}}
    (first,) = llm.chat(ask(IMAGE), GREEDY, use_tqdm=False)
    ids = first.prompt_token_ids
    prompts = [
        {"messages": ask(png())},
        {"messages": ask(str(tmp_path / "picture.png"))},
        {"messages": [{"role": "user", "content": [ask(IMAGE)[0]["content"][0], url]}]},
        {"messages": ask(None), "multi_modal_data": {"image": IMAGE}},
        {"prompt": first.prompt, "multi_modal_data": {"image": [IMAGE]}},
        {"prompt_token_ids": ids, "multi_modal_data": {"image": [IMAGE]}},
        {"prompt_token_ids": ids, "pictures": first.pictures},
    ]
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [facts(each) for each in found] == [facts(first)] * len(prompts)
    assert found[0].pictures[0].picture is first.pictures[0].picture
    assert facts(llm.chat(ask(random_picture(4, 36, 28)), GREEDY, use_tqdm=False)[0])[2:] != facts(first)[2:]
    policy = RolloutPolicy(llm)
    batch = policy.rollout([{"messages": ask(IMAGE)}], sampling_params=GREEDY, num_samples=1)
    assert batch["tokens", "prompt"][0][batch["masks", "prompt"][0]].tolist() == ids
    assert batch["tokens", "response"][0].tolist() == first.outputs[0].token_ids


def test_a_prompt_that_is_pooled_is_refused_by_the_part_that_is_a_picture(llm):
    (made,) = llm.chat(ask(IMAGE), GREEDY, use_tqdm=False)
    prompts = {
        "messages[0]['content'][1]['image']": {"messages": ask(IMAGE)},
        "multi_modal_data['image'][0]": {"prompt": made.prompt, "multi_modal_data": {"image": [IMAGE]}},
        "pictures[0]": {"prompt_token_ids": made.prompt_token_ids, "pictures": made.pictures},
    }
    for field, prompt in prompts.items():
        with pytest.raises(RequestError, match=re.escape(f"{field}='a picture' is not allowed") + ".*are not pooled"):
            llm.encode([prompt], use_tqdm=False)


def test_a_bad_picture_refuses_its_call_by_the_prompt_and_part_and_no_other(llm):
    good = ask(IMAGE)
    wanted = facts(llm.chat(good, GREEDY, use_tqdm=False)[0])
    with pytest.raises(RequestError) as caught:
        llm.generate([{"messages": good}, {"messages": ask(b"broken")}], GREEDY, use_tqdm=False)
    assert str(caught.value).startswith("prompts[1]: messages[0]['content'][1]['image']='a file of 6 bytes'")
    assert facts(llm.chat(good, GREEDY, use_tqdm=False)[0]) == wanted


def test_images_are_read_outside_of_the_event_loop(path, monkeypatch):
    threads = []
    read_all = PicturePrompts.read_all

    def noticed(self, given):
        if given and not all(hasattr(image, "picture") for _, image in given):
            threads.append(threading.current_thread())
        return read_all(self, given)

    monkeypatch.setattr(PicturePrompts, "read_all", noticed)

    async def run():
        client = LocalClient.start(EngineConfig(model=str(path), **OPTIONS), own_thread=True)
        async with AsyncLLM.from_client(client) as engine:
            outputs = [output async for output in engine.generate({"messages": ask(IMAGE)}, GREEDY)]
            with pytest.raises(RequestError, match="a file of 3 bytes"):
                async for _ in engine.generate({"messages": ask(b"bad")}, GREEDY):
                    pass
        return outputs[-1]

    output = asyncio.run(run())
    assert output.finished and len(output.pictures) == 1
    assert len(threads) == 2 and threading.current_thread() not in threads
