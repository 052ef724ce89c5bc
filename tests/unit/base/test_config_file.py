"""Engine options in a TOML file: what they become, and how mistakes are answered."""

import os

import pytest

from rollout_engine import ConfigError, EngineConfig
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.cli.overrides import parse_overrides

WHOLE = """\
# measured
model = "m"
max_num_seqs = 64
logits_processors = [
    "package.module:First",
    "package.module:Second",
]

[speculation]
max_draft_tokens = 4
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "engine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_makes_the_same_config_as_the_options_in_it(written):
    found = EngineConfig.load(written(WHOLE))
    assert found == EngineConfig(
        model="m",
        max_num_seqs=64,
        logits_processors=("package.module:First", "package.module:Second"),
        speculation=SpeculationConfig(max_draft_tokens=4),
    )


def test_options_of_the_call_replace_those_of_the_file(written):
    found = EngineConfig.load(written(WHOLE), max_num_seqs=8, speculation="off")
    assert (found.max_num_seqs, found.speculation) == (8, "off")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('model = "m"\n\nmax_num_seq = 4\n', 3, "Unknown EngineConfig option 'max_num_seq'. Did you mean 'max_num_seq"),
        ('model = "m"\nmax_num_seqs = "many"\n', 2, "max_num_seqs='many' is not allowed: must be an int"),
        ('model = "m"\nblock_size = 3\n', 2, "block_size=3 is not allowed: must be a divisor of 64"),
        ('model = "m"\nkv_cache_bytes = 1\nnum_kv_blocks = 1\n', 2, "kv_cache_bytes and num_kv_blocks both set"),
        ('model = "m"\nenable_expert_parallel = true\n', 2, "'enable_expert_parallel' is an option of vLLM's"),
        ('model = "m"\n[speculatoin]\nx = 1\n', 2, "Unknown EngineConfig option 'speculatoin'"),
        (WHOLE.replace("max_draft_tokens", "max_draft_token"), 10, "speculation: Unknown SpeculationConfig option"),
        (WHOLE.replace("= 4", "= 0"), 10, "speculation: max_draft_tokens=0 is not allowed"),
        (WHOLE + "sources = [\n  'rollouts',\n  'max_draft_tokens',\n]\n", 11, "speculation: sources"),
        ('model = "m"\nspeculation.max_draft_tokens = 0\n', 2, "speculation: max_draft_tokens=0 is not allowed"),
        ('model = "m"\nstop_regex = "max_num_seqs = 4"\n', 2, "'stop_regex' is not an option of EngineConfig: give"),
        ('model = "m"\nmax_num_seqs = 2026-01-01\n', 2, "max_num_seqs=datetime.date(2026, 1, 1) is not allowed"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_a_mistake_is_answered_with_its_line(written, text, line, message):
    path = written(text)
    with pytest.raises(ConfigError) as refused:
        EngineConfig.load(path)
    assert str(refused.value).startswith(f"{path}:{line}: {message}")


def test_a_key_that_is_missing_names_the_file(written):
    path = written("max_num_seqs = 4\n")
    with pytest.raises(ConfigError) as refused:
        EngineConfig.load(path)
    assert str(refused.value) == f"{path}: EngineConfig: give model=..., it has no default."


def test_a_mistake_of_the_call_does_not_blame_the_file(written):
    for options in ({"max_num_seqs": 0}, {"seed": -1}):
        with pytest.raises(ConfigError) as refused:
            EngineConfig.load(written(WHOLE), **options)
        assert str(refused.value).startswith(next(iter(options)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model = \n", "is not TOML: Invalid value (at line 1"),
        (b"model = '\xff'\n", "is not TOML: 'utf-8' codec"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"#" * (1 << 21), "cannot be read: it has more than 1048576 bytes"),
        (None, "cannot be read: No such file or directory. Give a TOML file, as `rollout-engine tune` writes."),
    ],
    ids=["cut", "bytes", "deep", "large", "missing"],
)
def test_what_is_no_toml_file_is_refused(tmp_path, content, message):
    path = tmp_path / "engine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        EngineConfig.load(path)
    assert message in str(refused.value)


def test_a_pipe_is_no_toml_file_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "engine.toml")
    with pytest.raises(ConfigError, match="cannot be read: it is a named pipe, not a regular file"):
        EngineConfig.load(tmp_path / "engine.toml")


def test_commands_take_a_file_and_let_options_beside_it_win(written):
    path = written('model = "m"\nmax_num_seqs = 64\nblock_size = 32\n')
    assert parse_overrides([f"config={path}", "block_size=8"]).engine == {"max_num_seqs": 64, "block_size": 8}
    assert parse_overrides(["block_size=8", f"config={path}"]).engine == {"max_num_seqs": 64, "block_size": 8}
    with pytest.raises(ConfigError, match=r"engine\.toml:1: Unknown EngineConfig option 'max_num_seq'"):
        parse_overrides([f"config={written('max_num_seq = 4')}"])
