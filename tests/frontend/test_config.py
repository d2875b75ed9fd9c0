"""Options from keywords and from the command line; what is not built says so, and nothing is dropped in silence."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import octavo
from octavo.api import flags
from octavo.api.cli import COMMANDS, configure
from octavo.api.help import show
from octavo.config import ConfigError, EngineConfig, cache_dir, count, environment_threads, length, read_option, size
from octavo.unbuilt import NO_MEANING, UNBUILT


def parse(*arguments: str) -> EngineConfig:
    """What `octavo serve` makes of its arguments."""
    return configure(COMMANDS["serve"], flags.parse(COMMANDS["serve"], arguments, show))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which the command line refuses."""
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    return lines[1]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OCTAVO_") or name in ("VLLM_API_KEY", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name)


def test_numbers_with_units() -> None:
    assert [count(text) for text in ("7", "1k", "1K", "25.6k", "2m", " 3 ")] == [7, 1000, 1024, 25600, 2_000_000, 3]
    assert [length(text) for text in ("auto", "-1", "AUTO", "4K")] == [-1, -1, -1, 4096]
    assert [size(text) for text in ("100", "2G", "2GiB", "2gib", "2Gi", "2GB", "2g", "512MiB", "1.5K")] == [
        100,
        2**31,
        2**31,
        2**31,
        2**31,
        2 * 10**9,
        2 * 10**9,
        2**29,
        1536,
    ]
    for wrong in ("", "k", "1.5", "four", "1kk", "0x10", "1e3"):
        with pytest.raises(ConfigError):
            count(wrong)
    for wrong in ("", "GiB", "2X", "1.0001", "-2G"):
        with pytest.raises(ConfigError):
            size(wrong)


def test_the_command_line_without_flags_is_the_default() -> None:
    assert parse() == EngineConfig()


def test_flags_reach_their_fields() -> None:
    config = parse(
        "--model",
        "m",
        "--served-model-name",
        "a",
        "b",
        "-q",
        "awq",
        "--max-model-len",
        "4K",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "1k",
        "--block-size",
        "32",
        "--kv-cache-dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "512MiB",
        "--gpu-memory-utilization",
        "0.5",
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        "--seed",
        "3",
        "--scheduling-policy",
        "priority",
        "--override-generation-config",
        '{"temperature": 0.5}',
        "--max-logprobs",
        "-1",
        "--api-key",
        "k1",
        "k2",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--cpu-activations",
        "int16",
        "--threads",
        "2",
        "--device",
        "reference",
        "--depth",
        "2",
        "--trust-remote-code",
        "--allowed-origins",
        '["http://a", "http://b"]',
    )
    assert config == EngineConfig(
        model="m",
        served_model_name=("a", "b"),
        quantization="awq",
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=1000,
        block_size=32,
        kv_cache_dtype="float32",
        kv_cache_memory_bytes=2**29,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        seed=3,
        scheduling_policy="priority",
        override_generation_config={"temperature": 0.5},
        max_logprobs=-1,
        api_key=("k1", "k2"),
        host="127.0.0.1",
        port=0,
        cpu_activations="int16",
        threads=2,
        device="reference",
        depth=2,
        trust_remote_code=True,
        allowed_origins=("http://a", "http://b"),
    )


def test_a_small_step_runs_fewer_sequences() -> None:
    assert parse("--max-num-batched-tokens", "32").max_num_seqs == 32
    assert parse("--max-num-batched-tokens", "32", "--max-num-seqs", "4").max_num_seqs == 4
    assert EngineConfig(max_num_seqs=8, max_num_batched_tokens=3).max_num_seqs == 3


def test_none_means_the_default() -> None:
    assert (
        EngineConfig.from_keywords(
            max_num_seqs=None,
            seed=None,
            dtype=None,
            served_model_name=None,
            enable_prefix_caching=None,
            max_model_len=None,
        )
        == EngineConfig()
    )


def test_every_field_has_help_and_a_flag() -> None:
    assert list(flags.OPTIONS) == [option.name for option in dataclasses.fields(EngineConfig)]
    for name, flag in flags.OPTIONS.items():
        assert flag.names[0] == f"--{name.replace('_', '-')}" and flag.dest == name
        assert flag.help.endswith((".", ")")) and "Default:" not in flag.help
        assert flag.group in flags.GROUPS


def test_defaults_in_words() -> None:
    shown = {name: flag.default for name, flag in flags.OPTIONS.items()}
    assert shown["block_size"] == "16" and shown["watchdog_timeout"] == "300" and shown["max_request_bytes"] == "32MiB"
    assert shown["enable_prefix_caching"] == "on" and shown["enable_log_requests"] == "off"
    assert shown["allowed_methods"] == "*" and shown["allowed_origins"] == "" and shown["revision"] == ""
    assert shown["max_model_len"] == "the model's own" and shown["override_generation_config"] == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--max-model-len", "long"), "--max-model-len: 'long' is not a number"),
        (("--max-model-len", "0"), "max_model_len must be at least 1"),
        (("--kv-cache-memory-bytes", "lots"), "'lots' is not a size"),
        (("--max-num-seqs", "0"), "max_num_seqs must be at least 1, got 0"),
        (("--gpu-memory-utilization", "1.5"), "gpu_memory_utilization must be at most 1.0"),
        (("--port", "70000"), "port must be at most 65535"),
        (("--override-generation-config", "{"), "is not JSON"),
        (("--override-generation-config", "[]"), "is not a JSON object"),
        (("--kv-cache-dtype", "nvfp4"), "invalid choice: 'nvfp4'"),
        (("--ssl-keyfile", "k"), "go together"),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size=2 cannot be used: .* one process"),
        (("-tp", "2"), "tensor_parallel_size=2 cannot be used"),
        (("-dp", "4"), "data_parallel_size=4 cannot be used"),
        (("--enable-lora",), "LoRA adapters are not built yet"),
        (("--enable-auto-tool-choice",), "Tool calls are not parsed yet"),
        (("--tool-call-parser", "hermes"), "Tool calls are not parsed yet"),
        (("--reasoning-parser", "qwen3"), "Reasoning is not parsed yet"),
        (("--speculative-config", '{"method": "ngram"}'), "Speculative decoding is not built yet"),
        (("--distributed-executor-backend", "ray"), "Ray"),
        (("--cpu-offload-gb", "4"), "Leave it at 0"),
        (("--nonsense", "1"), "unknown argument --nonsense"),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str) -> None:
    assert re.search(text, refused(capsys, *arguments))


def test_neutral_values_of_what_is_not_built_are_accepted() -> None:
    assert (
        parse(
            "-tp",
            "1",
            "--pipeline-parallel-size",
            "1",
            "--distributed-executor-backend",
            "mp",
            "--runner",
            "generate",
            "--speculative-config",
            "{}",
            "--cpu-offload-gb",
            "0",
            "--load-format",
            "auto",
        )
        == parse()
    )
    assert (
        EngineConfig.from_keywords(
            tensor_parallel_size=1,
            enable_lora=False,
            speculative_config=None,
            cpu_offload_gb=0,
            runner="auto",
            hf_overrides={},
        )
        == EngineConfig()
    )


def test_each_unbuilt_option_is_refused_as_a_keyword_too() -> None:
    for row in UNBUILT:
        with pytest.raises(ConfigError, match=row.keyword):
            EngineConfig.from_keywords(**{row.keyword: True if row.kind is bool else "something else"})


def test_options_without_a_meaning_warn(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("--swap-space", "4", "--enforce-eager", "--disable-log-requests") == parse()
    assert EngineConfig.from_keywords(swap_space=4, task="generate", use_v2_block_manager=True) == EngineConfig()
    for name in (
        "--swap-space",
        "--enforce-eager",
        "--disable-log-requests",
        "swap_space",
        "task",
        "use_v2_block_manager",
    ):
        assert f"{name} has no effect here" in caplog.text


def test_tables_and_fields_do_not_overlap() -> None:
    names = [option.name for option in dataclasses.fields(EngineConfig)]
    names += [row.keyword for row in UNBUILT] + [row.keyword for row in NO_MEANING]
    assert len(names) == len(set(names))
    spellings = [name for flag in flags.OPTIONS.values() for name in flag.names]
    spellings += [name for row in (*UNBUILT, *NO_MEANING) for name in row.flags]
    assert len(spellings) == len(set(spellings))


def test_unknown_keywords_get_a_hint() -> None:
    with pytest.raises(TypeError, match="'max_num_sequences'. Did you mean max_num_seqs"):
        EngineConfig.from_keywords(max_num_sequences=3)
    with pytest.raises(TypeError):
        EngineConfig(nonsense=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": "many"}, "max_num_seqs: 'many' is not a number"),
        ({"max_num_seqs": True}, "max_num_seqs must be int"),
        ({"max_num_seqs": None}, "max_num_seqs must be int"),
        ({"model": 3}, "model must be text"),
        ({"dtype": "int8"}, "dtype must be one of auto"),
        ({"block_size": 17}, "block_size must be one of 16, 32, 64, 128"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching must be bool"),
        ({"served_model_name": [1]}, "served_model_name must be a list of strings"),
        ({"served_model_name": 1}, "served_model_name must be a list of strings, got 1"),
        (
            {"override_generation_config": {"a": {1, 2}}},
            "override_generation_config must be what a JSON object can hold",
        ),
        ({"override_generation_config": {"a": ["\ud800"]}}, "override_generation_config must be UTF-8"),
        ({"max_model_len": -2}, "max_model_len must be at least -1"),
    ],
)
def test_wrong_keywords(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**options)


def test_keywords_may_be_written_as_on_the_command_line() -> None:
    config = EngineConfig(
        model=Path("a/b"),
        max_model_len="4k",
        kv_cache_memory_bytes="1GiB",  # type: ignore[arg-type]
        served_model_name="x",
        gpu_memory_utilization=1,
    )  # type: ignore[arg-type]
    assert (config.model, config.max_model_len, config.kv_cache_memory_bytes) == ("a/b", 4000, 2**30)
    assert (config.served_model_name, config.gpu_memory_utilization) == (("x",), 1.0)


def test_mappings_are_as_json_holds_them() -> None:
    config = EngineConfig(override_generation_config={"stop": ("a", "b"), "nested": {1: 2.5}})
    assert config.override_generation_config == {"stop": ["a", "b"], "nested": {"1": 2.5}}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_a_configuration_is_frozen_and_crosses_processes() -> None:
    config = EngineConfig(model="m", override_generation_config={"top_k": 3}, api_key=("secret",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "n"  # type: ignore[misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert "secret" not in repr(config)


def test_api_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert parse().api_key == ("theirs",)
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    assert parse().api_key == ("ours",)
    assert parse("--api-key", "given").api_key == ("given",)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == Path.home() / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "/y")
    assert cache_dir() == Path("/y")


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("3", 3),
        ("", None),
        ("0", None),
        ("-1", None),
        ("4,2", None),
        ("x", None),
    ],
)
def test_threads_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, threads: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert environment_threads() == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert environment_threads() is None


def test_only_the_configuration_reads_the_environment() -> None:
    root = Path(octavo.__file__).parent
    reads = re.compile(r"\bos\.(environ|getenv)\b")
    found = [str(path.relative_to(root)) for path in root.rglob("*.py") if reads.search(path.read_text())]
    assert found == ["config.py"]
    assert len(set(re.findall(r'environ\.get\("(\w+)"\)', (root / "config.py").read_text()))) <= 5


@pytest.mark.parametrize("option", [{"api_key": ("",)}, {"api_key": "  "}, {"served_model_name": ["a", ""]}])
def test_empty_texts_in_lists_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        EngineConfig(**option)


@pytest.mark.parametrize(
    "option",
    [
        {"max_model_len": 10**30},
        {"kv_cache_memory_bytes": "9" * 40},
        {"seed": -(2**63) - 1},
        {"seed": 2**63},
        {"model": "a\udcff"},
        {"chat_template": "{{ '\ud800' }}"},
        {"served_model_name": ("\udcff",)},
    ],
)
def test_what_cannot_cross_processes_is_refused(option: dict[str, Any]) -> None:
    [name] = option
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**option)
    largest = EngineConfig(seed=2**63 - 1, max_model_len=2**63 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(largest), type=EngineConfig) == largest


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "80", 80),
        ("gpu_memory_utilization", "5e-1", 0.5),
        ("enable_prefix_caching", "No", False),
        ("enable_log_requests", "1", True),
        ("max_model_len", "4k", 4000),
        ("max_request_bytes", "1MiB", 2**20),
        ("override_generation_config", '{"top_k": 3}', {"top_k": 3}),
        ("api_key", "a,b", ("a,b",)),
        ("block_size", "32", 32),
        ("revision", "1.0", "1.0"),
    ],
)
def test_options_from_text(name: str, text: str, value: object) -> None:
    assert read_option(name, text) == value


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("port", "http", "port must be a whole number, got 'http'"),
        ("request_timeout", "soon", "must be a number"),
        ("enable_log_requests", "maybe", "must be true or false"),
        ("enable_log_requests", 1, "must be bool"),
        ("revision", 1.0, "revision must be text, got 1.0"),
        ("block_size", "17", "one of 16, 32, 64, 128"),
    ],
)
def test_wrong_text(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_option(name, value)
