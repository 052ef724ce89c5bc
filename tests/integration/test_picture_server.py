"""A server of a model that takes pictures, and clients that mean no good: each has its picture or a typed error."""

import base64
import contextlib
import io
import json
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest
from PIL import Image

from rollout_engine import LLM, SamplingParams
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint

MOST = 1 << 20
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def png(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PICTURE, OTHER = png(random_picture(1)), png(random_picture(2, 24, 48))


def bomb(width=50_000, height=50_000):
    """A PNG of a few kilobytes that would take gigabytes."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


class Host(BaseHTTPRequestHandler):
    """An allowed host of pictures."""

    seen: list[str] = []
    is_over = threading.Event()

    def do_GET(self):
        self.seen.append(self.path)
        if self.path == "/slow":
            self.is_over.wait(30)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        data = {"/a.png": PICTURE, "/page": b"<secret>", "/long": bytes(MOST + 1)}.get(self.path, b"")
        self.send_response(200 if data else 404)
        self.send_header("Content-Type", "text/html" if self.path == "/page" else "image/png")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # of a client that has read enough
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    """Address of the allowed host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    Host.is_over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The allowed directory."""
    place = tmp_path_factory.mktemp("media")
    (place / "open").mkdir()
    (place / "open" / "a.png").write_bytes(PICTURE)
    (place / "secret").write_bytes(PICTURE)
    (place / "open" / "link.png").symlink_to(place / "secret")
    (place / "open" / "text.png").write_bytes(b"root:x:0:0:secret")
    return place / "open"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    checkpoint = tiny_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    with LLM(checkpoint, max_model_len=512, seed=3) as made:
        yield made


@pytest.fixture(scope="module")
def server(llm, host, place):
    limits = dict(max_picture_bytes=MOST, max_body_bytes=4 << 20, picture_seconds=0.5)
    options = ServeOptions(port=0, allow_media=[host], allow_media_dir=[str(place)], **limits)
    with HttpServer(llm, options) as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def conversation(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def chat(*parts, **fields):
    options = {"max_tokens": 6, "temperature": 0, "logprobs": True, "return_token_ids": True}
    return {"messages": conversation(*parts), **options, **fields}


def url_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def ask(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def outcome(answer):
    """(token ids of the prompt, of the answer, log-probs) of an answer of chat."""
    [choice] = answer["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return answer["prompt_token_ids"], choice["token_ids"], logprobs


@pytest.fixture(scope="module")
def expected(http):
    """The outcome of a picture in a data URL."""
    return outcome(ask(http, "/v1/chat/completions", chat(url_part(data_url(PICTURE)))))


def test_a_picture_has_the_same_bits_from_every_source(http, host, place, llm, expected):
    parts = [
        {"type": "image_url", "image_url": data_url(PICTURE)},
        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
        {"type": "image", "image": data_url(PICTURE)},
        url_part(f"http://{host}/a.png"),
        url_part(f"HTTP://{host}/to//a.png"),
        url_part(f"file://{place}/a.png"),
    ]
    for part in parts:
        assert outcome(ask(http, "/v1/chat/completions", chat(part))) == expected, part
    other = outcome(ask(http, "/v1/chat/completions", chat(url_part(data_url(OTHER)))))
    assert other[2] != expected[2]
    asked = {"messages": conversation({"type": "image", "image": PICTURE})}
    [alone] = llm.generate([asked], SamplingParams(max_tokens=6, temperature=0, logprobs=0), use_tqdm=False)
    sample = alone.outputs[0]
    assert (alone.prompt_token_ids, sample.token_ids, sample.logprobs.tolist()) == expected


def test_a_picture_has_the_same_bits_in_every_dialect(http, expected):
    prompt_ids, token_ids, logprobs = expected
    counted = ask(http, "/tokenize", {"messages": conversation(url_part(data_url(PICTURE)))})
    assert counted["tokens"] == prompt_ids
    settings = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
    media = {"multi_modal_data": {"image": data_url(PICTURE)}}
    [choice] = ask(http, "/inference/v1/generate", {"token_ids": prompt_ids, "sampling_params": settings, **media})[
        "choices"
    ]
    assert (choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]) == (token_ids, logprobs)
    text = f"<|user|>{PLACEHOLDER}What is it?<eos><|assistant|>"
    body = {"prompt": text, "add_special_tokens": False, "return_token_ids": True, **settings, **media}
    [choice] = ask(http, "/v1/completions", body)["choices"]
    assert (choice["prompt_token_ids"], choice["logprobs"]["token_logprobs"]) == (prompt_ids, logprobs)
    sampling = {"max_new_tokens": 6, "temperature": 0}
    for image_data in (base64.b64encode(PICTURE).decode(), [data_url(PICTURE)], [[{"url": data_url(PICTURE)}]]):
        asked = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, "image_data": image_data}
        answer = ask(http, "/generate", asked)
        assert [each[0] for each in answer["meta_info"]["output_token_logprobs"]] == logprobs
    batch = {"input_ids": [prompt_ids, [5, 6]], "image_data": [[data_url(PICTURE)], None], "sampling_params": sampling}
    first, _ = ask(http, "/generate", batch | {"return_logprob": True})
    assert [each[0] for each in first["meta_info"]["output_token_logprobs"]] == logprobs


def test_a_picture_has_the_same_bits_in_responses_and_messages(http, host, expected):
    prompt_ids, token_ids, _ = expected
    options = {"temperature": 0, "return_token_ids": True}
    text, encoded = "What is it?", base64.b64encode(PICTURE).decode()
    for url in (data_url(PICTURE), f"http://{host}/a.png"):
        parts = [{"type": "input_image", "detail": "auto", "image_url": url}, {"type": "input_text", "text": text}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 6, **options}
        answer = ask(http, "/v1/responses", body)
        assert (answer["prompt_token_ids"], answer["token_ids"]) == (prompt_ids, token_ids)
    sources = [
        {"type": "base64", "media_type": "image/png", "data": encoded},
        {"type": "url", "url": f"http://{host}/a.png"},
    ]
    for source in sources:
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 6, **options}
        answer = ask(http, "/v1/messages", body)
        assert (answer["prompt_token_ids"], answer["token_ids"]) == (prompt_ids, token_ids)
        count = ask(http, "/v1/messages/count_tokens", {"messages": body["messages"]})
        assert count == {"input_tokens": len(prompt_ids)}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": sources[0]}]}
    messages = [{"role": "user", "content": "Look."}, {"role": "user", "content": [result]}]
    assert ask(http, "/v1/messages", {"messages": messages, "max_tokens": 1})["content"] is not None


def test_a_picture_of_a_message_that_cannot_be_read_is_named(http):
    place = "messages[0]['content'][0]['source']"
    for source, said in (
        ({"type": "base64", "media_type": "image/png", "data": "????"}, f"{place}['data']"),
        ({"type": "base64", "media_type": "image/png"}, f"{place}['data']=None"),
        ({"type": "url", "url": "http://elsewhere.example/a.png"}, f"{place}['url']"),
    ):
        body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1}
        response = http.post("/v1/messages", json=body)
        assert response.status_code in (400, 403) and said in response.json()["error"]["message"]


def test_scores_of_ids_at_the_places_of_a_prompt_see_its_pictures(http, expected):
    prompt_ids, token_ids, _ = expected
    body = {"input_ids": prompt_ids, "image_data": [data_url(PICTURE)], "return_logprob": True, "logprob_start_len": 0}
    body |= {"sampling_params": {"max_new_tokens": 0}, "token_ids_logprob": list(dict.fromkeys(prompt_ids))}
    meta = ask(http, "/generate", body)["meta_info"]
    rows = meta["input_token_ids_logprobs"]
    assert len(rows) == len(prompt_ids) == len(meta["input_token_logprobs"])
    for row, (own, token, _) in list(zip(rows, meta["input_token_logprobs"], strict=True))[1:]:
        assert own in [value for value, listed, _ in row if listed == token]


def test_samples_of_a_stream_have_these_bits_too(http, expected):
    with http.stream("POST", "/v1/chat/completions", json=chat(url_part(data_url(PICTURE)), stream=True)) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    logprobs = [each["logprob"] for choice in choices for each in choice["logprobs"]["content"]]
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert (choices[0]["prompt_token_ids"], token_ids, logprobs) == expected


def attacks(host, place):
    """(name, part, status, words of the error) of each."""
    cut = PICTURE[: len(PICTURE) // 2]
    return [
        ("a path", {"type": "image", "image": "/etc/passwd"}, 400, "must be a URL"),
        ("a relative path", url_part("a.png"), 400, "must be a URL"),
        ("a size", {"type": "image", "image": data_url(PICTURE), "resized_height": 8}, 400, "absent"),
        ("a path in an object", {"type": "image", "image": {"path": "/etc/passwd"}}, 400, "must be a text"),
        ("a key of others", {"type": "image", "path": "/etc/passwd"}, 400, "must be absent"),
        ("no type", {"image": "/etc/passwd"}, 400, "must be a"),
        ("a list", {"type": "image", "image": [0, 0]}, 400, "must be a text"),
        ("no url", {"type": "image_url", "image_url": {}}, 400, "must be a text"),
        ("a file outside", url_part("file:///etc/passwd"), 400, "below a directory"),
        ("a file above", url_part(f"file://{place}/../secret"), 400, "below a directory"),
        ("a file above, encoded", url_part(f"file://{place}/%2e%2e/secret"), 400, "below a directory"),
        ("a link", url_part(f"file://{place}/link.png"), 400, "Links are not followed"),
        ("a text file", url_part(f"file://{place}/text.png"), 400, "a file of 17 bytes"),
        ("loopback", url_part("http://127.0.0.1/a.png"), 400, "a host and port that this server"),
        ("loopback, decimal", url_part(f"http://2130706433:{host.split(':')[1]}/a.png"), 400, "a host and port"),
        ("loopback, IPv6", url_part("http://[::1]/a.png"), 400, "a host and port"),
        ("metadata", url_part("http://169.254.169.254/latest"), 400, "a host and port"),
        ("a user name", url_part(f"http://{host}@evil/a.png"), 400, "without a user name"),
        ("a redirect out", url_part(f"http://{host}/to/http://169.254.169.254/"), 400, "a host and port"),
        ("a redirect to a file", url_part(f"http://{host}/to/file://{place}/a.png"), 400, "must be a URL"),
        ("a page", url_part(f"http://{host}/page"), 400, "content of type text/html"),
        ("nothing there", url_part(f"http://{host}/none"), 400, "status 404"),
        ("a slow host", url_part(f"http://{host}/slow"), 504, "has not sent the picture within 0.5 s"),
        ("a long download", url_part(f"http://{host}/long"), 413, f"{MOST} bytes"),
        ("other schemes", url_part("ftp://127.0.0.1/a"), 400, "must be a URL"),
        ("wrong base64", url_part("data:image/png;base64,!!!"), 400, "standard base64"),
        ("no base64", url_part("data:image/png,abc"), 400, "in base64"),
        ("not a picture", url_part(data_url(b"secret words")), 400, "a file of 12 bytes"),
        ("a cut picture", url_part(data_url(cut)), 400, "can be decoded"),
        ("a bomb", url_part(data_url(bomb())), 400, "pixels"),
        ("an SVG", url_part(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")), 400, "SVG"),
        ("an SVG in disguise", url_part(data_url(b"<svg onload='x'/>")), 400, "SVG"),
        ("a flat picture", url_part(data_url(png(Image.new("L", (100_000, 1))))), 400, "must be"),
        ("a long picture", url_part(data_url(bytes(MOST + 1))), 413, f"{MOST} bytes"),
        ("a video", {"type": "video_url", "video_url": {"url": "http://127.0.0.1/"}}, 400, "not served"),
        (
            "detail",
            {"type": "image_url", "image_url": {"url": data_url(PICTURE), "detail": "low"}},
            400,
            "'auto', 'high'",
        ),
    ]


def test_no_attack_reads_what_it_may_not_or_changes_the_bits_of_others(http, server, host, place, expected):
    def attack(each):
        name, part, status, told = each
        started = time.monotonic()
        response = http.post("/v1/chat/completions", json=chat(part))
        error = response.json()["error"]
        assert response.status_code == status and told in error["message"], (name, response.text)
        assert error["message"].startswith("messages[0]['content'][0]"), (name, error)
        assert "secret words" not in response.text and "root:x" not in response.text and "<secret>" not in response.text
        assert time.monotonic() - started < 30, name

    def bystand(_):
        assert outcome(ask(http, "/v1/chat/completions", chat(url_part(data_url(PICTURE))))) == expected

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(attack, each) for each in attacks(host, place)]
        tasks += [pool.submit(bystand, i) for i in range(8)]
        for task in tasks:
            task.result()
    assert server.app.served.media.num_open_bytes == 0


def test_more_or_fewer_pictures_than_placeholders_are_refused(http, expected):
    prompt_ids, one, settings = expected[0], data_url(PICTURE), {"sampling_params": {"max_tokens": 1}}
    bodies = [
        ("/inference/v1/generate", {"token_ids": prompt_ids, "multi_modal_data": {"image": [one, one]}, **settings}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "multi_modal_data": {"image": [one]}, **settings}),
        ("/v1/completions", {"prompt": PLACEHOLDER * 2, "multi_modal_data": {"image": [one]}, "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["a", "b"], "multi_modal_data": {"image": [one]}}),
        ("/v1/completions", {"prompt": "a", "multi_modal_data": {"video": [one]}}),
        ("/v1/completions", {"prompt": "a", "multi_modal_data": {"image": ["/etc/passwd"]}}),
        ("/generate", {"text": "no placeholder", "image_data": one}),
        ("/generate", {"text": ["a", "b", "c"], "image_data": [one, one]}),
        ("/generate", {"text": PLACEHOLDER, "image_data": "/etc/passwd"}),
        ("/generate", {"text": PLACEHOLDER, "image_data": [[[one]]]}),
        ("/v1/chat/completions", chat(*[url_part(one)] * 9)),
    ]
    for path, body in bodies:
        response = http.post(path, json=body)
        assert response.status_code == 400 and response.json()["error"]["param"], (body, response.text)


def test_a_text_with_the_placeholder_brings_no_picture(http):
    """It is words, or it is refused: never a picture, and never a step that fails."""
    for parts in ([], [url_part(data_url(PICTURE))]):
        body = chat(*parts, {"type": "text", "text": f"{PLACEHOLDER} <|image_pad|>"})
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and "image_pad" in response.text, response.text


def test_a_body_beyond_the_bound_is_refused_whatever_it_holds(http):
    body = chat(url_part("data:image/png;base64," + "A" * (5 << 20)))
    assert http.post("/v1/chat/completions", json=body).status_code == 413


def test_clients_that_leave_free_what_their_pictures_take(server, host):
    Host.seen.clear()
    with httpx2.Client(base_url=server.url, timeout=0.2) as client:
        for _ in range(3):
            parts = url_part(data_url(PICTURE)), url_part(f"http://{host}/slow")
            with pytest.raises(httpx2.TimeoutException):
                client.post("/v1/chat/completions", json=chat(*parts))
    deadline = time.monotonic() + 10
    while server.app.served.media.num_open_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.app.served.media.num_open_bytes == 0 and Host.seen.count("/slow") == 3


def test_caches_of_pictures_are_reset_by_routes(http, expected):
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert ask(http, path, {})["success"] is True
    assert outcome(ask(http, "/v1/chat/completions", chat(url_part(data_url(PICTURE))))) == expected
