import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.tokenizer import TextCodec


def codec_with_first_token():
    """A tokenizer that puts <s> before every text by itself, as Llama's do."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "hi": 1}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", chat_template=template))


def test_text_prompts_get_the_tokenizers_own_first_token():
    assert codec_with_first_token().encode("hi hi") == [0, 1, 1]


def test_a_first_token_that_is_there_twice_is_said_once_and_can_be_left_out(caplog):
    codec = codec_with_first_token()
    assert codec.encode("<s> hi") == codec.encode("<s> hi") == [0, 0, 1]
    assert codec.encode("<s> hi", add_special_tokens=False) == [0, 1]
    (record,) = caplog.records
    assert "begins with '<s>', which the tokenizer adds by itself: it is there twice" in record.getMessage()


def test_a_chat_template_that_writes_the_first_token_gets_no_second():
    codec = codec_with_first_token()
    text = codec.chat_prompt([{"role": "user", "content": "hi"}], None)
    assert (text, codec.encode(text, add_special_tokens=False)) == ("<s>hi", [0, 1])


@pytest.fixture
def with_template(tmp_path):
    """Load a tokenizer with the engine's option `chat_template`."""
    byte_tokenizer().save_pretrained(tmp_path)

    def load(chat_template, **options):
        config = EngineConfig(model=str(tmp_path), chat_template=chat_template, **options)
        return TextCodec.from_config(config)

    return load


SHOUTING = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"


def test_an_engines_chat_template_stands_in_for_the_tokenizers_as_text_or_file(with_template, tmp_path):
    file, braces = tmp_path / "shouting.jinja", tmp_path / "{1}.jinja"
    for each in (file, braces):
        each.write_text(SHOUTING)
    for given in (SHOUTING, file, str(file), braces):
        codec = with_template(given)
        assert codec.chat_prompt([{"role": "user", "content": "hi"}]) == "HI!"
        assert codec.hf.chat_template == SHOUTING
    assert with_template(None).hf.chat_template == byte_tokenizer().chat_template


@pytest.mark.parametrize(
    "given, words",
    [
        ("missing.jinja", "chat_template='missing.jinja' is not allowed: .*No such file"),
        ("{% for m in messages %}", "chat_template is not a Jinja template: line 1: Unexpected end of template"),
        ("{{ 1 + }}", "chat_template is not a Jinja template: line 1"),
        (5, "chat_template=5 is not allowed: must be a str"),
    ],
)
def test_a_chat_template_that_is_none_is_refused_at_the_start(with_template, given, words):
    with pytest.raises(ConfigError, match=words):
        with_template(given)


def test_a_file_that_is_no_chat_template_is_refused_by_its_path(with_template, tmp_path):
    plain, binary = tmp_path / "plain.txt", tmp_path / "binary"
    plain.write_text("Hello.")
    binary.write_bytes(b"{{ \xff }}")
    with pytest.raises(ConfigError, match=r"chat_template='.* is not allowed: must be a file with a Jinja template"):
        with_template(plain)
    with pytest.raises(ConfigError, match="chat_template: '.* cannot be read: 'utf-8' codec"):
        with_template(binary)
    with pytest.raises(ConfigError, match="chat_template and skip_tokenizer_init=True are both set"):
        with_template(SHOUTING, skip_tokenizer_init=True)


def test_a_chat_template_that_refuses_some_conversations_is_taken(with_template):
    assert with_template("{{ raise_exception('a system message is missing') }}").hf.chat_template


def test_a_tokenizer_without_a_template_refuses_conversations():
    hf = byte_tokenizer()
    hf.chat_template = None
    with pytest.raises(RequestError, match="chat template"):
        TextCodec(hf).chat_prompt([{"role": "user", "content": "hi"}], None)


def test_a_text_is_whole_though_the_tokenizers_file_truncates_and_pads():
    hf = byte_tokenizer()
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=9)
    assert TextCodec(hf).encode("abcd") == byte_tokenizer().encode("abcd")


def test_a_tokenizer_with_an_encode_of_its_own_uses_it():
    class Shouts(PreTrainedTokenizerFast):
        def encode(self, text, **options):
            return super().encode(text.upper(), **options)

    hf = Shouts(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert TextCodec(hf).encode("abc") == byte_tokenizer().encode("ABC")


def test_special_tokens_are_divided_like_other_text_where_the_tokenizer_says_so():
    hf = byte_tokenizer()
    whole = TextCodec(hf).encode(hf.eos_token, add_special_tokens=False)
    hf.split_special_tokens = True
    assert whole == [hf.eos_token_id]
    assert TextCodec(hf).encode(hf.eos_token, add_special_tokens=False) != whole


def test_a_saved_tokenizer_loads(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert TextCodec.from_pretrained(str(tmp_path)).encode("a") == byte_tokenizer().encode("a")


def test_a_broken_tokenizer_file_is_refused_with_its_place_and_the_way_out(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=f"'{tmp_path}'.*skip_tokenizer_init=True"):
        TextCodec.from_pretrained(str(tmp_path))


def test_a_template_that_old_releases_wrote_for_processors_is_read(tmp_path):
    tokenizer = byte_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert TextCodec.from_pretrained(str(tmp_path)).hf.chat_template == template
    (tmp_path / "chat_template.json").write_text('{"chat_template": 3}')
    with pytest.raises(ConfigError, match=r"chat_template\.json: chat_template=3 is not valid"):
        TextCodec.from_pretrained(str(tmp_path))
