"""The command line: help, flags of vLLM, config files, the environment, talking to a server, exit statuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from octavo.api import cli, flags
from octavo.api.cli import COMMANDS, configure, main
from octavo.api.help import markdown, show
from octavo.api.sources import from_file
from octavo.config import ConfigError, EngineConfig
from octavo.unbuilt import NO_MEANING, UNBUILT
from tests.api.conftest import Api
from tests.api.harness import MODEL, SAID, ScriptEngine, make_tokenizer, parts_of, running

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No options from the environment of whoever runs the tests; a terminal of 100 columns."""
    for name in list(os.environ):
        if name == "VLLM_API_KEY" or (name.startswith("OCTAVO_") and name != "OCTAVO_CACHE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")


def parse(*arguments: str) -> EngineConfig:
    """What `octavo serve` makes of its arguments."""
    return configure(COMMANDS["serve"], flags.parse(COMMANDS["serve"], arguments, show))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that ends the program well, as --help does."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence after the usage, with which a command line is refused."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    usage, sentence = capsys.readouterr().err.strip().splitlines()
    assert usage.startswith("usage: octavo ")
    return sentence


# -- help


def test_the_short_help_has_a_line_per_flag(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "serve", "--help").splitlines()
    assert max(map(len, lines)) <= 120
    for flag in COMMANDS["serve"].flags:
        name = flag.names[0].removeprefix("--")
        found = [line for line in lines if line.split("  ")[1:2] and f"{name} " in line[:38] and line[2] in "-"]
        assert found, name
    assert len(lines) < len(COMMANDS["serve"].flags) + 40
    [line] = [line for line in lines if "--max-num-seqs N" in line]
    assert line.endswith(" [128]")
    assert any(line.startswith("scheduler: ") for line in lines)
    assert "tensor-parallel-size" not in "\n".join(lines)


def test_the_full_help_tells_default_choices_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "serve", "--help=all").split())
    assert "--block-size {16,32,64,128} Tokens per KV block. Default: 16. Environment: OCTAVO_BLOCK_SIZE." in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text
    for flag in COMMANDS["serve"].flags:
        assert flag.names[0] in text and flag.help in text


@pytest.mark.parametrize("word", ["scheduler", "Scheduler", "SchedulerConfig"])
def test_help_of_a_group(capsys: pytest.CaptureFixture[str], word: str) -> None:
    text = printed(capsys, "serve", f"--help={word}")
    assert text.startswith("scheduler: ")
    assert "--max-num-seqs" in text and "--depth" in text and "--block-size" not in text


@pytest.mark.parametrize("word", ["--max-num-seqs", "max-num-seqs", "max_num_seqs"])
def test_help_of_one_flag(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert " ".join(printed(capsys, "serve", f"--help={word}").split()) == (
        "--max-num-seqs N Sequences that run at once; no more than --max-num-batched-tokens. Default: 128. "
        "Environment: OCTAVO_MAX_NUM_SEQS."
    )


def test_help_of_flags_that_contain_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "serve", "--help", "ssl")
    found = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    assert found == {
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
        "--enable-ssl-refresh",
    }
    assert "one process" in printed(capsys, "serve", "--help=-tp")
    assert "Has no effect here: " in printed(capsys, "serve", "--help=swap-space")
    assert printed(capsys, "serve", "--help=--model").startswith("  --model MODEL")


def test_groups_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "serve", "--help=listgroup").splitlines()
    with_flags = {flag.group for flag in flags.OPTIONS.values()}
    assert [line.split()[0] for line in lines] == [group for group in flags.GROUPS if group in with_flags]


def test_help_of_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean scheduler" in refused(capsys, "serve", "--help=schedular")
    assert "Did you mean max-num-seqs" in refused(capsys, "serve", "--help=--max-nums-seqs")
    assert "--help=listgroup lists the groups" in refused(capsys, "serve", "--help=zzzzz")


@pytest.mark.parametrize("command", ["run", "chat", "complete"])
def test_commands_that_do_not_serve_have_no_flags_of_a_server(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = printed(capsys, command, "--help=all")
    assert "--max-tokens" in text and "--max-model-len" in text and "--threads" in text and "--chat-template" in text
    for flag in ("--port", "--ssl-keyfile", "--max-num-queued-reqs", "--disable-log-stats", "--allowed-origins"):
        assert flag not in text
        value = () if flags.OPTIONS[flag[2:].replace("-", "_")].kind is bool else ("1",)
        assert f"{flag} is a flag of octavo serve" in refused(capsys, command, "m", flag, *value)


def test_the_page_of_options_is_up_to_date() -> None:
    text = "\n".join(markdown(COMMANDS["serve"])) + "\n"
    assert (ROOT / "docs" / "options.md").read_text() == text, "run: octavo serve --help=markdown > docs/options.md"


# -- flags of vLLM, from its configuration classes and from what is still pasted; with a value that asks for something

OPTIONS = """
--model m | --tokenizer t | --trust-remote-code | --dtype float16 | --seed 3 | --max-model-len 25.6k
--served-model-name a b | --revision r | --tokenizer-revision r | --quantization gguf | -q gguf | --max-logprobs 5
--hf-token t | --generation-config vllm | --override-generation-config {"top_k":3} | --download-dir /d
--block-size 32 | --gpu-memory-utilization 0.5 | --device-memory-utilization 0.5 | --kv-cache-memory-bytes 2G
--kv-cache-dtype float16 | --enable-prefix-caching | --no-enable-prefix-caching | --num-gpu-blocks-override 100
--max-num-batched-tokens 4096 | --max-num-seqs 8 | --max-num-queued-reqs 9 | --enable-chunked-prefill
--no-enable-chunked-prefill | --scheduling-policy priority | --disable-log-stats | --otlp-traces-endpoint http://x
--enable-log-requests | --max-log-len 10 | --log-level debug | --host 127.0.0.1 | --port 80 | --uds /s
--uvicorn-log-level error | --disable-uvicorn-access-log | --api-key a b | --ssl-ca-certs c | --ssl-cert-reqs 1
--ssl-ciphers c | --allowed-origins ["a"] | --allowed-methods ["GET"] | --allowed-headers ["x"]
--allow-credentials | --root-path /p | --chat-template t | --chat-template-content-format string
--trust-request-chat-template | --default-chat-template-kwargs {"a":1} | --response-role model
--return-tokens-as-token-ids | --enable-force-include-usage | --sse-keep-alive-interval 3 | --disable-fastapi-docs
--shutdown-timeout 30 | --enable-per-request-metrics | --device cpu
"""

REFUSED = """
--runner pooling | --convert embed | --tokenizer-mode mistral | --quantization-config {"bits":4}
--disable-sliding-window | --logprobs-mode raw_logits | --skip-tokenizer-init | --enable-prompt-embeds
--hf-overrides {"a":1} | --hf-config-path /p | --config-format mistral | --model-impl transformers
--logits-processors a:b | --io-processor-plugin p | --enable-sleep-mode | --load-format runai_streamer
--model-loader-extra-config {"a":1} | --tensor-parallel-size 2 | -tp 2 | --pipeline-parallel-size 2 | -pp 2
--data-parallel-size 2 | -dp 2 | --data-parallel-size-local 2 | --data-parallel-backend ray
--data-parallel-hybrid-lb | --data-parallel-external-lb | --enable-expert-parallel | -ep
--decode-context-parallel-size 2 | -dcp 2 | --prefill-context-parallel-size 2 | -pcp 2
--distributed-executor-backend ray | --nnodes 2 | --node-rank 1 | --worker-cls c | --worker-extension-cls c
--cpu-offload-gb 4 | --kv-offloading-size 4 | --kv-offloading-backend lmcache | --max-num-active-seqs 4
--max-num-scheduled-tokens 4 | --max-num-queued-tokens 4 | --long-prefill-token-threshold 4 | --scheduler-cls c
--stream-interval 10 | --enable-lora | --lora-modules a=b c=d | --default-mm-loras {"a":"b"}
--speculative-config {"method":"ngram"} | -sc {"method":"ngram"} | --spec-method ngram | --spec-model m
--spec-tokens 3 | --structured-outputs-config {"backend":"xgrammar"} | --reasoning-parser qwen3
--reasoning-parser-plugin p | --enable-auto-tool-choice | --tool-call-parser hermes | --tool-parser-plugin p
--tool-server demo | --exclude-tools-when-tool-choice-none | --tool-strict-level all
--limit-mm-per-prompt {"image":1} | --mm-processor-kwargs {"a":1} | --media-io-kwargs {"a":1}
--collect-detailed-traces all | --log-config-file f | --profiler-config {"a":1} | --kv-transfer-config {"a":1}
--kv-events-config {"a":1} | --ec-transfer-config {"a":1} | --middleware m | --api-server-count 4 | -asc 4
--rope-scaling {"type":"yarn"} | --rope-theta 1e6 | --enable-reasoning | --speculative-model m
--headless | --grpc | --enable-ssl-refresh | --enable-tokenizer-info-endpoint
"""

WARNED = """
--code-revision r | --enforce-eager | --allowed-local-media-path /p | --allowed-media-domains a b
--renderer-num-workers 2 | --safetensors-load-strategy eager | --ignore-patterns a b | --use-tqdm-on-load
--pt-load-map-location cpu | --data-parallel-address a | --data-parallel-rpc-port 1 | --all2all-backend a
--enable-eplb | --eplb-config {"a":1} | --master-addr a | --master-port 1 | --disable-custom-all-reduce
--enable-dbo | --max-parallel-loading-workers 2 | --numa-bind | --prefix-caching-hash-algo xxhash
--offload-backend uva | --mamba-cache-dtype float32 | --mamba-ssm-cache-dtype float32 | --mamba-cache-mode all
--prefix-cache-retention-interval 3 | --kv-sharing-fast-prefill | --long-prefill-token-threshold-adaptive
--scheduler-reserve-full-isl | --no-scheduler-reserve-full-isl | --watermark 0.1 | --prefill-schedule-interval 2
--async-scheduling | --no-async-scheduling | --disable-hybrid-kv-cache-manager | --disable-chunked-mm-input
--max-loras 2 | --max-lora-rank 32 | --max-cpu-loras 2 | --lora-dtype auto | --fully-sharded-loras
--lora-target-modules a b | --mm-processor-cache-gb 4 | --mm-processor-cache-type shm | --mm-encoder-tp-mode data
--language-model-only | --skip-mm-profiling | --video-pruning-rate 0.5 | --optimization-level 3 | -O 3 | -O3
--performance-mode throughput | --compilation-config {"level":3} | -cc {"level":3} | --compilation-config.level 3
--cudagraph-capture-sizes 1 2 4 | --max-cudagraph-capture-size 8 | --attention-backend FLASH_ATTN
--attention-config {"a":1} | --kernel-config {"a":1} | --moe-backend triton | --linear-backend a
--kv-cache-metrics | --custom-histogram-buckets {"a":[1]} | --enable-mfu-metrics | --cudagraph-metrics
--enable-logging-iteration-details | --show-hidden-metrics-for-version 0.9 | --enable-prompt-tokens-details
--enable-server-load-tracking | --enable-request-id-headers | --swap-space 4 | --task generate
--disable-log-requests | --guided-decoding-backend xgrammar | --max-seq-len-to-capture 8192
--num-scheduler-steps 8 | --use-v2-block-manager | --preemption-mode swap | --num-lookahead-slots 3
--calculate-kv-scales | --max-num-partial-prefills 2 | --disable-frontend-multiprocessing
"""


def lines_of(table: str) -> list[list[str]]:
    """One command line per entry."""
    return [entry.split() for entry in table.replace("\n", " | ").split(" | ") if entry.strip()]


@pytest.mark.parametrize("line", lines_of(OPTIONS), ids=" ".join)
def test_flags_of_vllm_that_are_options(line: list[str], caplog: pytest.LogCaptureFixture) -> None:
    config = parse(*line)
    assert "no effect" not in caplog.text
    off = {"--enable-prefix-caching", "--enable-chunked-prefill"}  # on already
    assert (config == parse()) == (line[0] in off)


@pytest.mark.parametrize("line", lines_of(REFUSED), ids=" ".join)
def test_flags_of_vllm_that_are_refused(capsys: pytest.CaptureFixture[str], line: list[str]) -> None:
    sentence = refused(capsys, "serve", *line)
    assert " cannot be used: " in sentence and sentence.endswith(".")


@pytest.mark.parametrize("line", lines_of(WARNED), ids=" ".join)
def test_flags_of_vllm_without_an_effect(line: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert parse(*line, "--port", "8001") == parse("--port", "8001")
    [record] = [record for record in caplog.records if "has no effect here: " in record.message]
    row = next(row for row in NO_MEANING if record.message.startswith(f"{row.flags[0]} "))
    assert record.levelname == "WARNING" and row.reason in record.message


def test_every_row_of_the_tables_is_tried() -> None:
    tried = {line[0].partition(".")[0].replace("--no-", "--") for line in lines_of(REFUSED) + lines_of(WARNED)}
    rare = {row.flags[0] for row in (*UNBUILT, *NO_MEANING) if not tried & set(row.flags)}
    assert rare == {
        *("--data-parallel-rank", "--data-parallel-start-rank", "--worker-use-ray", "--num-speculative-tokens"),
        *("--numa-bind-nodes", "--numa-bind-cpus", "--mamba-block-size", "--multi-step-stream-outputs"),
        *("--max-long-partial-prefills", "--lora-extra-vocab-size", "--guided-decoding-disable-fallback"),
        *("--guided-decoding-disable-any-whitespace", "--disable-mm-preprocessor-cache", "--cuda-graph-sizes"),
        *("--trust-request-mm-kwargs", "--kv-cache-metrics-sample", "--h11-max-incomplete-event-size"),
        *("--h11-max-header-count", "--enable-offline-docs"),
    }


@pytest.mark.parametrize(
    ("flag", "today"),
    [
        ("--disable-log-requests", "--enable-log-requests"),
        ("--swap-space", "--kv-cache-memory-bytes"),
        ("--task", "--runner"),
        ("--num-scheduler-steps", "--depth"),
        ("--async-scheduling", "--depth"),
        ("--guided-decoding-backend", "structured_outputs"),
    ],
)
def test_warnings_name_the_flag_of_today(flag: str, today: str) -> None:
    assert today in next(row.reason for row in NO_MEANING if row.flags[0] == flag)


def test_neutral_switches_are_accepted() -> None:
    calm = "--no-enable-lora --no-enable-auto-tool-choice --no-enable-sleep-mode --enable-expert-parallel=false"
    assert parse(*calm.split(), "-tp=1", "--stream-interval", "1") == parse()


# -- spellings


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max_model_len", "4k"], "max_model_len", 4000),
        (["--max_model_len=4K"], "max_model_len", 4096),
        (["--max-model-len=auto"], "max_model_len", -1),
        (["--max-model-len", "-1"], "max_model_len", -1),
        (["--no_enable_prefix_caching"], "enable_prefix_caching", False),
        (["--enable-prefix-caching=false"], "enable_prefix_caching", False),
        (["--enable-log-requests=True"], "enable_log_requests", True),
        (["-q=gguf"], "quantization", "gguf"),
        (["--api-key", "a", "--api-key", "b", "c"], "api_key", ("a", "b", "c")),
        (["--model=a_b"], "model", "a_b"),
        (["org/a_b"], "model", "org/a_b"),
        (["--", "--odd_name"], "model", "--odd_name"),
        (["--override-generation-config.top_k", "3"], "override_generation_config", {"top_k": 3}),
        (["--override_generation_config.a.b=x"], "override_generation_config", {"a": {"b": "x"}}),
        (
            ["--override-generation-config", '{"a": {"b": 1}, "c": 2}', "--override-generation-config.a.d", "3"],
            "override_generation_config",
            {"a": {"b": 1, "d": 3}, "c": 2},
        ),
    ],
)
def test_spellings(arguments: list[str], field: str, value: object) -> None:
    assert getattr(parse(*arguments), field) == value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-num-sequences", "3"], "unknown argument --max-num-sequences. Did you mean --max-num-seqs"),
        (["--max_num_sequences=3"], "Did you mean --max-num-seqs"),
        (["--zzz"], "unknown argument --zzz. See octavo serve --help."),
        (["m", "n"], "unknown argument n. What belongs to no flag stands before the flags, several words in quotes."),
        (["m", "--model", "n"], "two models are named: m and --model n; name one."),
        (["--max-model", "3"], "unknown argument --max-model"),
        (["--port"], "expected one argument"),
        (["--override-generation-config.top_k"], "expected one argument"),
        (["--enable-prefix-caching=maybe"], "ignored explicit argument 'maybe'"),
        (["--speculative-config.method", "ngram"], "speculative_config={'method': 'ngram'} cannot be used"),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert text in refused(capsys, "serve", *arguments)


# -- config files

YAML = """
model: a/b            # a comment
port: 8123
max-model-len: 4k
served_model_name: [one, two]
enable-prefix-caching: false
gpu-memory-utilization: 5e-1
override-generation-config: {temperature: 0.5, nested: {top_k: 3}}
api-key:
  - secret
allowed-origins: ["*"]
hf-token:
revision:
tensor-parallel-size: 1
swap-space: 4
"""


def test_a_config_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(YAML)
    expected = EngineConfig(
        model="a/b",
        port=8123,
        max_model_len=4000,
        served_model_name=("one", "two"),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        override_generation_config={"temperature": 0.5, "nested": {"top_k": 3}},
        api_key=("secret",),
        allowed_origins=("*",),
    )
    assert parse("--config", str(path)) == expected
    assert f"{path}: swap-space has no effect here: " in caplog.text
    values = {"model": "a/b", "port": 8123, "max-model-len": 4000, "served-model-name": ["one", "two"]}
    path = tmp_path / "server.json"
    path.write_text(json.dumps({**values, "enable-prefix-caching": False, "allowed-origins": "*"}))
    config = parse("--config", str(path))
    assert (config.model, config.port, config.max_model_len) == ("a/b", 8123, 4000)
    assert (config.served_model_name, config.enable_prefix_caching) == (("one", "two"), False)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yml"
    path.write_text("model: file\nport: 1\nseed: 1\nenable-prefix-caching: true\napi-key: file\n")
    monkeypatch.setenv("OCTAVO_PORT", "2")
    monkeypatch.setenv("OCTAVO_SEED", "2")
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("OCTAVO_API_KEY", "environment")
    config = parse("line", "--config", str(path), "--port", "3", "--no-enable-prefix-caching")
    assert (config.model, config.port, config.seed, config.max_num_seqs) == ("line", 3, 1, 2)
    assert not config.enable_prefix_caching and config.api_key == ("file",)
    monkeypatch.setenv("OCTAVO_CONFIG", str(path))
    assert parse().model == "file"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max-num-seq: 3", "there is no option max-num-seq. Did you mean max-num-seqs"),
        ("zzzz: 3", "there is no option zzzz. See octavo serve --help."),
        ("no-enable-prefix-caching: true", "Write enable-prefix-caching: false"),
        ("port: high", "c.yaml: port must be a whole number, got 'high'."),
        ("port: 70000", "c.yaml: port must be at most 65535, got 70000."),
        ("port: [1]", "c.yaml: port must be int, got [1]."),
        ("revision: 1.0", "c.yaml: revision must be text, got 1.0. Put it in quotes."),
        ("log-level: off", "c.yaml: log-level must be text, got False. Put it in quotes."),
        ("dtype: int3", "c.yaml: dtype must be one of auto, half"),
        ("max-model-len: long", "c.yaml: max-model-len: 'long' is not a number"),
        ("enable-log-requests: maybe", "must be true or false, got 'maybe'"),
        ("override-generation-config: [1]", "override-generation-config must be dict, got [1]"),
        ("tensor-parallel-size: 2", "c.yaml: tensor-parallel-size=2 cannot be used: Octavo runs"),
        ("port: 1\nport: 2", "port is there twice (line 2); keep one."),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs is there twice; keep one."),
        ("gpu-memory-utilization: 0.5\ndevice-memory-utilization: 0.6", "device-memory-utilization is there twice"),
        ("override-generation-config:\n  top_k: 1\n  top_k: 2", "top_k is there twice (line 3); keep one."),
        ("- port", "must hold a mapping, such as max-model-len: 4k, but holds a list."),
        ("port", "must hold a mapping, such as max-model-len: 4k, but holds a str."),
        ("1: 2", "the key 1 is not text"),
        ("port: {", "is not YAML: "),
        ("allowed-origins: *", "is not YAML: "),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML: could not determine a constructor"),
        ("enable-log-outputs: true", "enable_log_outputs needs enable_log_requests."),
    ],
)
def test_wrong_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    said = refused(capsys, "serve", "--config", str(path))
    assert sentence in said
    assert str(path) in said or "needs" in said


ODD = (
    "true",
    "-1",
    "1.5",
    ".nan",
    "-.inf",
    "1" + 40 * "0",
    "''",
    "'  '",
    "x",
    "[]",
    "[1]",
    "[null]",
    "[[a]]",
    "{}",
    "{1: 2}",
    "{a: {b: 1}}",
    "2024-01-01",
    "!!binary aGk=",
    "!!set {a, b}",
    '"\\ud800"',
    '"\\0"',
)


@pytest.mark.parametrize("name", [*flags.OPTIONS, "tensor_parallel_size", "enable_lora", "lora_modules", "swap_space"])
def test_odd_values_are_taken_or_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c.yaml"
    key = name.replace("_", "-")
    taken = []
    for text in ODD:
        path.write_text(f"{key}: {text}\n")
        try:
            config = EngineConfig(**from_file(path).values)
        except ConfigError as error:
            assert key in str(error) or name in str(error)
        else:
            taken.append(text)
            msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    assert len(taken) < len(ODD) or name == "swap_space"  # which warns, whatever its value


def test_config_files_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot read the config file /not/there.yaml: No such file or directory." in refused(
        capsys, "serve", "--config", "/not/there.yaml"
    )
    assert f"cannot read the config file {tmp_path}: Is a directory." in refused(
        capsys, "serve", "--config", str(tmp_path)
    )
    path = tmp_path / "c.json"
    path.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused(capsys, "serve", "--config", str(path))
    path.write_text('{"port": 1, "port": 2}')
    assert "port is there twice; keep one." in refused(capsys, "serve", "--config", str(path))
    path.write_text('{"port": 1,}')
    assert f"{path} is not JSON: " in refused(capsys, "serve", "--config", str(path))
    path = tmp_path / "empty.yaml"
    path.write_text("# port: 1\n")
    assert parse("--config", str(path)) == EngineConfig()


# -- the environment


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in {
        "MODEL": "m",
        "MAX_MODEL_LEN": "4K",
        "ENABLE_PREFIX_CACHING": "false",
        "ALLOWED_ORIGINS": "http://a, http://b",
        "SERVED_MODEL_NAME": '["x", "y"]',
        "API_KEY": "a,b",
        "OVERRIDE_GENERATION_CONFIG": '{"top_k": 2}',
        "TENSOR_PARALLEL_SIZE": "1",
        "ENABLE_LORA": "false",
        "SWAP_SPACE": "4",
        "CACHE": "/cache",
        "PORT": "",
        "MAX_NUM_SEQ": "3",
    }.items():
        monkeypatch.setenv(f"OCTAVO_{name}", text)
    assert parse() == EngineConfig(
        model="m",
        max_model_len=4096,
        enable_prefix_caching=False,
        allowed_origins=("http://a", "http://b"),
        served_model_name=("x", "y"),
        api_key=("a,b",),
        override_generation_config={"top_k": 2},
    )
    assert [record.message for record in caplog.records if record.name == "octavo.api.cli"] == [
        "environment variable OCTAVO_SWAP_SPACE has no effect here: preempted requests are computed again, nothing is "
        "swapped; the cache is sized with --kv-cache-memory-bytes.",
        "The environment variable OCTAVO_MAX_NUM_SEQ names no option. Did you mean OCTAVO_MAX_NUM_SEQS?",
    ]


def test_variables_that_kubernetes_makes_for_a_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("OCTAVO_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("OCTAVO_SERVICE_PORT", "8000")
    monkeypatch.setenv("OCTAVO_SERVICE_PORT_HTTP", "8000")
    monkeypatch.setenv("OCTAVO_PORT_8000_TCP_ADDR", "10.0.0.1")
    assert parse() == EngineConfig() and not caplog.records


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("OCTAVO_PORT", "high", "environment variable OCTAVO_PORT must be a whole number, got 'high'."),
        ("OCTAVO_TENSOR_PARALLEL_SIZE", "2", "environment variable OCTAVO_TENSOR_PARALLEL_SIZE=2 cannot be used: "),
        ("OCTAVO_ENABLE_LORA", "1", "LoRA adapters are not built yet"),
        ("OCTAVO_CONFIG", "/not/there", "cannot read the config file /not/there"),
    ],
)
def test_wrong_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, text: str, sentence: str
) -> None:
    monkeypatch.setenv(name, text)
    assert sentence in refused(capsys, "serve")


# -- the program


def test_the_program_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == "octavo 0.1.0\n"
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert [line[2:19].strip() for line in overview.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert main([]) == 2 and "usage: octavo COMMAND" in capsys.readouterr().out
    assert main(["srve", "m"]) == 2
    assert capsys.readouterr().err == "octavo: error: there is no command srve. Did you mean octavo serve?\n"
    assert main(["--model", "m"]) == 2
    assert "Commands: serve, run, chat, complete" in capsys.readouterr().err


def test_the_server_at_the_place_where_vllm_has_it() -> None:
    arguments = [sys.executable, "-m", "octavo.entrypoints.openai.api_server", "--max-num-sequences", "3"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean --max-num-seqs" in done.stderr
    arguments = [*arguments[:3], "--model", "/not/there", "--host", "127.0.0.1", "--port", "0"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True)
    assert done.returncode == 1 and b"octavo: error: " in done.stderr and b"Traceback" not in done.stderr


START = """
import sys
from octavo.api import cli
from octavo.api.serve import Parts
from octavo.client import Process
from tests.api.harness import tiny_text
cli._parts = lambda: Parts(lambda config: Process(config, "tests.api.harness:build_slow"), tiny_text)
sys.exit(cli.main())
"""


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.25, 0.4, 0.6])
def test_sigterm_while_it_starts(seconds: float) -> None:
    arguments = [sys.executable, "-c", START, "serve", "tiny", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (0, 143, -signal.SIGTERM)  # -15: before any of our code has run
    assert "Traceback" not in errors


def test_sigterm_ends_a_model_that_is_loaded_here() -> None:
    arguments = [sys.executable, "-c", START, "complete", "tiny", "-q", "a", "--temperature", "0"]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(5) == b"Alpha"
    [engine] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143 and errors == b"" and not engine.is_running()


# -- talking


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def asked(api: Api) -> list[str]:
    """The prompts that the model got."""
    return [make_tokenizer().decode(request.prompt) for request in api.engine.seen]


def test_quick_chat(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", f"{api.url}/v1", "-q", "hi", "--system-prompt", "be", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == SAID + "\n"
    assert asked(api) == ["system\nbe\nuser\nhi\nassistant\n"]


def test_piped_chat_has_neither_prompts_nor_escapes(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\ntwo\n")
    assert main(["chat", "--url", api.url, "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{SAID}\n{SAID}\n" and err == ""
    assert asked(api)[1] == f"user\none\nassistant\n{SAID}\nuser\ntwo\nassistant\n"


def test_quick_reads_standard_input(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "one\ntwo\n")
    assert main(["chat", "--url", api.url, "-q", "-", "--temperature", "0"]) == 0
    assert asked(api) == ["user\none\ntwo\n\nassistant\n"]


def test_complete(api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "one\ntwo\n")
    assert main(["complete", "--url", api.url, "--model-name", MODEL, "--temperature", "0", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "Alpha beta\nAlpha beta\n"
    assert asked(api) == ["one", "two"]


def test_stats(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.engine.pause = 0.002
    assert main(["complete", "--url", api.url, "-q", "a", "--temperature", "0", "--max-tokens", "3", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "Alpha beta, DEF\n"
    assert err.startswith("[first token after 0.") and "; 3 tokens in 0." in err and err.endswith(" tokens/s]\n")


def test_errors_end_with_status_1(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["chat", "--url", api.url, "--model-name", "other", "-q", "hi"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: The model `other` does not exist")
    api.engine.fail_after = 2
    typed(monkeypatch, "one\ntwo\n")
    assert main(["complete", "--url", api.url, "--temperature", "0"]) == 1
    out, err = capsys.readouterr()
    assert out == "Alpha beta\n" and len(err.splitlines()) == 1 and "not finite" in err
    assert main(["chat", "--url", "http://127.0.0.1:1", "-q", "hi"]) == 1
    assert capsys.readouterr().err == "octavo: error: cannot talk to http://127.0.0.1:1: Connection refused\n"


def test_without_a_url_or_a_model_the_local_server_is_meant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "DEFAULT_URL", "http://127.0.0.1:1/v1")
    assert main(["chat", "-q", "hi"]) == 1
    assert "cannot talk to http://127.0.0.1:1/v1: Connection refused; start a server" in capsys.readouterr().err


def test_a_model_that_is_loaded_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = ScriptEngine()
    monkeypatch.setattr(cli, "_parts", lambda: parts_of(engine))
    assert main(["run", MODEL, "hi", "--temperature", "0", "--system", "be"]) == 0
    assert main(["run", MODEL, "hi", "--raw", "--temperature", "0"]) == 0
    assert main(["chat", MODEL, "-q", "hi", "--temperature", "0", "--max-num-seqs", "4"]) == 0
    typed(monkeypatch, "all of\nit\n")
    assert main(["run", MODEL, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{SAID}\n" * 4
    prompts = [make_tokenizer().decode(request.prompt) for request in engine.seen]
    first = "system\nbe\nuser\nhi\nassistant\n"
    assert prompts == [first, "hi", "user\nhi\nassistant\n", "user\nall of\nit\n\nassistant\n"]
    path = tmp_path / "c.yaml"  # a server's file: what is a server's is left out
    path.write_text("ssl-keyfile: k\nssl-certfile: c\nroot-path: /p\nport: 1\n")
    assert main(["complete", MODEL, "-q", "hi", "--config", str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chat", "--url", "u", "--uds", "s"], "--url and --uds name two servers; give one."),
        (["chat", "--url", "u", "--max-model-len", "4k"], "--max-model-len is for a model that is loaded here"),
        (["chat", "--seed", "3"], "--seed is for a model that is loaded here"),
        (["complete", "--config", "f"], "--config is for a model that is loaded here"),
        (["complete", "m", "--api-key", "k"], "--api-key is for a server"),
        (["chat", "m", "--model-name", "k"], "--model-name is for a server"),
        (["run", "m", "--url", "k"], "unknown argument --url"),
        (["run", "m", "p", "--api-key", "k"], "--api-key is a flag of octavo serve; octavo run does not serve others."),
        (["run"], "the following arguments are required: MODEL"),
        (["chat", "m", "--enable-lora"], "LoRA adapters are not built yet"),
    ],
)
def test_wrong_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert text in refused(capsys, *arguments)


def test_api_keys_are_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with running(parts_of(ScriptEngine()), api_key=("secret",)) as url:
        assert main(["chat", "--url", url, "-q", "hi"]) == 1
        assert "API key" in capsys.readouterr().err
        assert main(["chat", "--url", url, "-q", "hi", "--api-key", "secret"]) == 0
        monkeypatch.setenv("OCTAVO_API_KEY", "secret")
        assert main(["complete", "--url", url, "-q", "hi"]) == 0


def test_a_reader_that_has_enough(api: Api) -> None:
    program = f"{sys.executable} -m octavo complete --url {api.url} -q a --temperature 0 | head -c 0"
    done = subprocess.run(["sh", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_ctrl_c_ends_a_command_with_130(api: Api) -> None:
    api.engine.pause = 0.5  # the answer must not end before the signal, however busy the machine is
    arguments = [sys.executable, "-m", "octavo", "complete", "--url", api.url, "-q", "a", "--temperature", "0"]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(5) == b"Alpha"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == b"" and out.endswith(b"\n")
