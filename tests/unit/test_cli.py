"""The command line: what is printed for programs, and how mistakes are answered."""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.cli import doctor, terminal
from rollout_engine.cli.main import COMMANDS, main
from rollout_engine.cli.overrides import parse_overrides
from rollout_engine.cli.prompts import read_prompts
from rollout_engine.kernels import linear
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint

POOL = "num_kv_blocks=64"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model")))


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_overrides_go_to_the_class_that_has_the_name():
    found = parse_overrides(["dtype=float32", "max_num_seqs=4", "max_tokens=8", "temperature=0", 'stop=["a=b"]'])
    assert found.engine == {"dtype": "float32", "max_num_seqs": 4}
    assert found.sampling == {"max_tokens": 8, "temperature": 0.0, "stop": ["a=b"]}
    SamplingParams(**found.sampling)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", "auto"),
        ("true", True),
        ("false", False),
        *((text, text) for text in ("perhaps", "\udcff", "[" * 10**5)),
    ],
    ids=["auto", "true", "false", "word", "no-text", "deep"],
)
def test_values_take_the_type_of_their_field(text, value):
    assert parse_overrides([f"deterministic={text}"]).engine == {"deterministic": value}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("stop=a", ["a"]),
        ("stop=4", ["4"]),
        ('stop=["a", "b"]', ["a", "b"]),
        ("stop_token_ids=5", [5]),
        ("bad_words=a, b", ["a, b"]),
        ('logit_bias={"5": 1}', {5: 1.0}),
    ],
)
def test_one_value_is_a_list_of_one_and_several_are_json(argument, value):
    found = parse_overrides([argument])
    assert found.sampling == {argument.partition("=")[0]: value}
    SamplingParams(**found.sampling)


@pytest.mark.parametrize(("argument", "example"), [('stop=["a"', '["a", "b"]'), ("logit_bias={5: 1}", '{"5": 1.0}')])
def test_a_list_that_is_not_json_is_refused_with_an_example(argument, example):
    name = argument.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        parse_overrides([argument])
    assert str(refused.value) == f"{argument} is not JSON: write it as {name}='{example}'."


def test_without_arguments_the_help_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


def test_other_keys_of_a_json_line_are_columns(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "2 + 2 =", "answer": "4"}\n"text"\n{"messages": [], "tools": null, "level": 1}\n')
    given = read_prompts(argparse.Namespace(prompt=["first"], file=path))
    assert [each.prompt for each in given] == ["first", {"prompt": "2 + 2 ="}, "text", {"messages": [], "tools": None}]
    assert [each.columns for each in given] == [{}, {"answer": "4"}, {}, {"level": 1}]


def test_a_json_line_without_a_prompt_says_which_keys_it_has(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "2 + 2 =", "answer": "4"}\n')
    with pytest.raises(RequestError) as refused:
        read_prompts(argparse.Namespace(prompt=[], file=path))
    assert str(refused.value) == (
        f"{path}, prompt 0: no prompt. It needs one of the keys prompt, prompt_token_ids, messages; it has question, "
        "answer."
    )


def test_seed_is_the_engines():
    assert parse_overrides(["seed=7"]).engine == {"seed": 7}


def test_an_unknown_key_names_the_closest():
    with pytest.raises(ConfigError, match="Unknown option 'temprature'. Did you mean 'temperature'?"):
        parse_overrides(["temprature=1"])


def test_what_is_no_pair_is_refused():
    with pytest.raises(ConfigError, match="'fast' is not an option: write key=value"):
        parse_overrides(["fast"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "nowhere/at/all", "--prompt", "a"),
        ("generate", "MODEL", "max_tokens=2"),
        ("generate", "MODEL", "--prompt", "a", "max_tokens=none"),
        ("generate", "MODEL", "--prompt", "a", "top_p=0"),
        ("generate", "MODEL", "--file", "missing.txt"),
        ("rollout", "MODEL", "--prompt", "a", "block_size=3"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(arguments, checkpoint, capsys):
    assert run(*(checkpoint if part == "MODEL" else part for part in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"rollout-engine {arguments[0]}: ")


@pytest.mark.parametrize("line", ["{", "[" * 10**5], ids=["cut", "deep"])
def test_a_line_that_is_not_json_is_refused(tmp_path, line):
    (tmp_path / "p.jsonl").write_text(f'"one"\n{line}\n')
    with pytest.raises(RequestError, match="prompt 1: not JSON"):
        read_prompts(argparse.Namespace(prompt=[], file=tmp_path / "p.jsonl"))


def test_an_unknown_command_names_the_closest(capsys):
    with pytest.raises(SystemExit) as ended:
        run("docter")
    assert ended.value.code == 2
    assert "Did you mean 'doctor'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    assert f"usage: rollout-engine {command}" in capsys.readouterr().out


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from rollout_engine.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "rollout_engine", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("rollout-engine 0.")


def test_generate_prints_json_lines(checkpoint, capsys):
    options = ("n=2", "max_tokens=3", "logprobs=0", "ignore_eos=true", POOL)
    assert run("generate", checkpoint, "--prompt", "2 + 2 =", "--json", "--prompt", "b", *options) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["2 + 2 =", "b"]
    assert [len(s["token_ids"]) for line in lines for s in line["samples"]] == [3] * 4
    assert all(len(s["logprobs"]) == 3 and s["finish_reason"] == "length" for s in lines[0]["samples"])


def test_generate_prints_text(checkpoint, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('"one"\n[5, 6]\n{"prompt": "three"}\n')
    assert run("generate", checkpoint, "--file", str(tmp_path / "p.jsonl"), "max_tokens=2", POOL) == 0
    printed = capsys.readouterr().out
    assert printed.count("[0: ") == 3
    assert "\none\n" in printed and "\nthree\n" in printed


def test_chat_wraps_prompts_in_messages(checkpoint, capsys):
    assert run("generate", checkpoint, "--prompt", "hi", "--chat", "--json", "max_tokens=1", POOL) == 0
    ids = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    assert len(ids) > len("hi")


@pytest.fixture
def always_slow(monkeypatch):
    """Has every command count as one that takes long."""
    monkeypatch.setattr(terminal, "QUIET_SECONDS", 0.0)


def test_work_that_takes_long_is_announced_and_other_work_is_not(capsys, monkeypatch):
    with terminal.announce("quick"):
        pass
    assert not capsys.readouterr().err
    monkeypatch.setattr(terminal, "QUIET_SECONDS", 0.0)
    shown = ""
    with terminal.announce("slow"):
        while not shown:  # while it works
            shown = capsys.readouterr().err
    assert shown == "slow ...\n" and capsys.readouterr().err == "slow: done in 0 s\n"
    with pytest.raises(KeyError), terminal.announce("failing"):
        raise KeyError


def test_commands_say_what_they_wait_for(checkpoint, tmp_path, capsys, always_slow):
    assert run("generate", checkpoint, "--prompt", "a", "--prompt", "b", "max_tokens=1", POOL) == 0
    told = capsys.readouterr().err
    assert f"loading {checkpoint}: done in" in told and "sampling 2 prompts: done in" in told
    log = tmp_path / "rollouts.jsonl"
    with RolloutPolicy.from_pretrained(checkpoint, num_kv_blocks=64) as policy:
        policy.rollout(["a"], SamplingParams(max_tokens=1), log_to=log, use_tqdm=False)
    assert run("replay", str(log), POOL) == 0
    told = capsys.readouterr().err
    assert f"loading {checkpoint}: done in" in told and "making 1 sample again: done in" in told


@pytest.mark.parametrize("name", ["folder", "no/such/out.jsonl"])
@pytest.mark.parametrize("command", [["rollout", "--prompt", "a"], ["tune"], ["simulate", "--measure"]], ids=" ".join)
def test_that_a_file_cannot_be_written_is_found_before_anything_is_measured(tmp_path, capsys, name, command):
    (tmp_path / "folder").mkdir()
    assert run(*command, str(tmp_path / "no model"), "--out", str(tmp_path / name)) == 2
    assert f"--out {tmp_path / name} cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--sample", "0"], ["--explain", "--sample", "0"]], ids=" ".join)
def test_replay_says_that_a_file_is_empty(tmp_path, capsys, options):
    (tmp_path / "empty.jsonl").touch()
    assert run("replay", str(tmp_path / "empty.jsonl"), *options) == 2
    assert "empty.jsonl has no rollouts" in capsys.readouterr().err


def test_replay_of_a_directory_names_the_files_in_it(tmp_path, capsys):
    (tmp_path / "samples.jsonl").write_text("")
    assert run("replay", str(tmp_path)) == 2
    assert f"must be one file of rollouts. In this directory: {tmp_path}/samples.jsonl." in capsys.readouterr().err


def test_serve_finds_out_before_it_loads_a_model_that_a_port_is_taken(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run("serve", str(tmp_path / "no model"), "--port", port) == 2
    assert f"port={port} cannot be listened on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--chat-template", "missing.jinja"], "chat_template='missing.jinja' is not allowed"),
        (["--chat-template", "{% if"], "chat_template is not a Jinja template: line 1"),
        (["--chat-template", "{{ 1 }}", "chat_template={{ 2 }}"], "are both set: give one of them"),
        (["--allow-media", "a.example", "--allow-media", "https://b.example"], "allow_media='https://b.example'"),
        (["--allow-media-dir", "/no/such/place"], "allow_media_dir='/no/such/place'"),
    ],
)
def test_serve_checks_its_options_before_it_listens(checkpoint, options, words, capsys):
    assert run("serve", checkpoint, "--port", "0", *options) == 2
    assert words in capsys.readouterr().err


def test_generate_gives_pictures_to_chat_templates_alone(checkpoint, capsys):
    assert run("generate", checkpoint, "--prompt", "a", "--image", "a.png") == 2
    assert "--image needs --chat" in capsys.readouterr().err


def test_rollout_writes_one_line_per_sample_that_replays(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "ab", "answer": [4, "b"]}\n\n"longer prompt"\n')
    out = tmp_path / "rollouts.jsonl"
    options = ("n=2", "max_tokens=4", "seed=3", POOL)
    assert run("rollout", checkpoint, "--file", str(prompts), "--out", str(out), *options) == 0
    assert f"4 samples in {out}" in capsys.readouterr().err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["group_id"], line["sample_index"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [line["prompt"] for line in lines] == ["ab", "ab", "longer prompt", "longer prompt"]
    assert [line["columns"] for line in lines] == [{"answer": [4, "b"]}] * 2 + [{"answer": None}] * 2
    for line in lines:
        assert len(line["prompt_token_ids"]) == len(line["prompt"])
        counts = {len(line[k]) for k in ("response_token_ids", "log_probs", "policy_version", "kv_min_version")}
        assert len(counts) == 1 and set(line["policy_version"]) <= {0}
    assert run("rollout", checkpoint, "--file", str(prompts), *options) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines


def test_bench_reports_work_and_shares(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("rollout_engine.cli.ceilings._READ_BYTES", 1 << 20)
    small = ("--prompts", "2", "--prompt-tokens", "5", "--rounds", "1", "n=2", "max_tokens=3", POOL)
    assert run("bench", checkpoint, "--json", *small) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["work"] == "2x2, 5+3"
    assert all(result[f"tokens_per_second{of}"] > 0 for of in ("", "_by_gemm", "_by_reading"))
    assert 0 <= result["share_of_reading"] and 0 <= result["share_of_gemm"]  # rounded: a busy machine reaches nothing
    assert result["machine"]["cpu"] and result["versions"]["torch"]


def test_shard_writes_what_generate_loads(checkpoint, tmp_path, capsys):
    prompt = ["--prompt", "one two", "--json", POOL, "max_tokens=6"]
    assert run("generate", checkpoint, *prompt) == 0
    expected = capsys.readouterr().out
    assert run("shard", checkpoint, str(tmp_path / "state"), POOL) == 0
    assert "load_format=sharded" in capsys.readouterr().out
    assert run("generate", str(tmp_path / "state"), *prompt, "load_format=sharded") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == json.loads(expected)["samples"]
    assert run("shard", checkpoint, str(tmp_path / "state"), POOL) == 2
    assert "a directory that is not there yet" in capsys.readouterr().err


def test_doctor_knows_kernels_plans_and_versions(capsys):
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["row_plans"]) == {"torch.float32", "torch.bfloat16"}
    assert found["transports"] == ["inproc", "gloo", "ipc", "nccl", "shm", "store"]
    assert found["kernels"]["loaded"] or found["kernels"]["problem"]
    assert found["versions"]["torch"]
    root = Path(__file__).parents[2]
    assert all((root / page.partition(":")[0]).exists() for page in found["pages"].values())


def test_doctor_prints_no_number_that_stands_for_none(capsys, monkeypatch):
    monkeypatch.setattr(linear, "plan_for", lambda weight: linear.PLAIN)
    assert doctor.examine()["row_plans"]["torch.float32"] == {"kernel": "library", "rows at once": "any number"}
    monkeypatch.setattr(linear, "plan_for", lambda weight: linear.RowPlan("onednn", 2, 256))
    assert doctor.examine()["row_plans"]["torch.float32"] == {"kernel": "onednn", "rows at once": "2 to 256"}


def test_doctor_says_why_a_device_does_not_serve_and_what_one_would_use(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "unsupported_reason", lambda device: "torch finds no CUDA device")
    assert doctor.examine()["devices"] == {"cpu": "yes", "cuda": "no: torch finds no CUDA device"}
    monkeypatch.setattr(doctor, "unsupported_reason", lambda device: None)
    properties = SimpleNamespace(name="H200", total_memory=141 << 30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert "yes: H200, 141 GiB" in printed and "cuda_graphs" in printed


def test_doctor_says_what_to_do_without_a_compiler(capsys, monkeypatch):
    monkeypatch.setattr("rollout_engine.kernels.cpu.build.COMPILER", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert "Install no-such-compiler (" in printed and "No such file or directory: 'no-such-compiler'" in printed


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rollout_engine", "watch", str(tmp_path), "--once"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupted_command_prints_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert run("doctor") == 130
    assert capsys.readouterr().err == "rollout-engine doctor: interrupted\n"
