"""The files in deploy/: each against the schema or tool of its own kind, against Octavo's flags, and one another."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from octavo.api.cli import COMMANDS
from octavo.api.flags import parse
from octavo.api.sources import configuration
from octavo.config import EngineConfig
from tests.api.harness import ScriptEngine, parts_of, running
from tests.docs.blocks import ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
ROOM = 10
"""Seconds that a server takes to end, beside what running requests get (octavo.api.serve: 5 for its connections)."""


def options_of(arguments: list[str]) -> EngineConfig:
    """What a command line of `octavo` (without that word) means. Fails for one that is wrong, or warned of."""
    assert arguments[0] == "serve"
    namespace = parse(COMMANDS["serve"], arguments[1:], lambda *_: None)
    namespace.model = namespace.model or namespace.model_tag
    config, warnings = configuration(COMMANDS["serve"], namespace)
    assert not warnings
    return config


def seconds(text: str) -> float:
    """Of a duration as systemd and Docker write it: 90s, 20min, 15m."""
    number, unit = re.fullmatch(r"([\d.]+)(s|m|min|h)?", text).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[unit]


# -- systemd


UNIT = DEPLOY / "octavo.service"


def unit_values(key: str) -> list[str]:
    """Every value of a key of the unit."""
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


def copy_of_unit(folder: Path, *replacements: tuple[str, str]) -> Path:
    """The unit, with a program that is here."""
    text = UNIT.read_text()
    for old, new in (("/opt/octavo/bin/octavo", sys.executable), *replacements):
        assert old in text
        text = text.replace(old, new)
    (folder / UNIT.name).write_text(text)
    return folder / UNIT.name


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which("systemd-analyze"):
        if os.environ.get("CI"):
            pytest.fail("systemd-analyze is missing: apt install systemd")
        pytest.skip("systemd-analyze is not here: apt install systemd")
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = analyze("verify", str(copy_of_unit(tmp_path)))
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr
    broken = analyze("verify", str(copy_of_unit(tmp_path, ("RestartSec=2s", "RestartSeconds=2s"))))
    assert "RestartSeconds" in broken.stderr


def test_the_unit_has_few_rights(tmp_path: Path) -> None:
    done = analyze("security", "--offline=true", "--threshold=20", str(copy_of_unit(tmp_path)))
    assert done.returncode == 0, done.stdout[-300:]
    weaker = copy_of_unit(tmp_path, ("CapabilityBoundingSet=\n", ""), ("DynamicUser=yes\n", ""))
    assert analyze("security", "--offline=true", "--threshold=20", str(weaker)).returncode != 0


def test_the_unit_starts_what_its_options_say() -> None:
    command = shlex.split(unit_values("ExecStart")[0])
    assert command[:2] == ["/opt/octavo/bin/octavo", "serve"]
    assert command[2:] == ["--config", "/etc/octavo/server.yaml"]
    config = options_of(["serve", "--config", str(DEPLOY / "server.yaml")])
    assert f"http://{config.host}:{config.port}/health" in unit_values("ExecStartPost")[0]
    assert seconds(unit_values("TimeoutStopSec")[0]) >= config.shutdown_timeout + ROOM
    for folder in re.findall(r"=(/\S+)", unit_values("Environment")[0]):
        assert folder.startswith(f"/var/cache/{unit_values('CacheDirectory')[0]}")


class _Loading(http.server.BaseHTTPRequestHandler):
    """Answers /health with 503 twice, then with 200."""

    asked: list[int]

    def do_GET(self) -> None:
        status = 200 if len(self.asked) >= 2 else 503
        self.asked.append(status)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_started_means_ready() -> None:
    """The command that systemd waits for ends when /health is 200, not before."""
    _Loading.asked = []
    with http.server.HTTPServer(("127.0.0.1", 0), _Loading) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = unit_values("ExecStartPost")[0].replace(":8000", f":{server.server_port}")
        done = subprocess.run(shlex.split(command), timeout=60)
        server.shutdown()
    assert done.returncode == 0 and _Loading.asked == [503, 503, 200]


# -- Docker


DOCKERFILE = DEPLOY / "Dockerfile"


def instructions(name: str) -> list[str]:
    parser = DockerfileParser(path=str(DOCKERFILE))
    return [one["value"] for one in parser.structure if one["instruction"] == name]


def test_hadolint_has_nothing_to_say(tmp_path: Path) -> None:
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace("debian:bookworm-slim", "debian:latest"))
    assert "DL3007" in subprocess.run(["hadolint", str(worse)], capture_output=True, text=True).stdout


def test_the_image_is_made_of_files_that_the_context_has() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied: set[str] = set()
    for value in instructions("COPY"):
        words = shlex.split(value)
        if words[0].startswith("--from="):
            assert words[0] == "--from=build" and words[1] == words[2] == "/opt/octavo"
        else:
            copied |= set(words[:-1])
    assert copied == allowed
    for name in copied:
        assert (ROOT / name).exists(), name


def test_the_image_has_all_that_the_package_needs() -> None:
    """What a source distribution has, the build stage has too."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    copied = {word for value in instructions("COPY") for word in shlex.split(value)[:-1]}
    assert set(build["sdist"]["include"]) | {"pyproject.toml"} <= copied


def test_the_image_installs_as_the_readme_says() -> None:
    assert "pip install ." in (ROOT / "README.md").read_text()
    assert any(run.endswith("/pip install --no-cache-dir .") for run in instructions("RUN"))


def test_the_image_runs_a_command_line_that_octavo_knows_as_nobody() -> None:
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["octavo"]
    config = options_of(json.loads(instructions("CMD")[0]))
    assert config.model == "smollm2" and instructions("EXPOSE") == [str(config.port)]
    assert int(instructions("USER")[-1].split(":")[0]) > 0
    assert seconds(docker_stop_seconds()) >= config.shutdown_timeout + ROOM


def docker_stop_seconds() -> str:
    return re.search(r"docker stop -t (\d+)", (ROOT / "docs" / "docker.md").read_text())[1]  # type: ignore[index]


def test_the_health_check_asks_the_server() -> None:
    command = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[0] == "python3"
    with running(parts_of(ScriptEngine())) as url:
        here = [sys.executable, *(part.replace("http://127.0.0.1:8000", url) for part in command[1:])]
        assert url in here[-1]
        assert subprocess.run(here, timeout=30).returncode == 0
    loaded = threading.Event()
    with running(parts_of(ScriptEngine(), loaded), wait=False) as url:
        here[-1] = re.sub(r"http://[\d.:]+", url, here[-1])
        assert subprocess.run(here, timeout=30, stderr=subprocess.DEVNULL).returncode == 1
        loaded.set()


COMPOSE = DEPLOY / "compose.yaml"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_compose_follows_the_specification(tmp_path: Path) -> None:
    done = check_compose(COMPOSE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period", "stop_grace_periods"))
    assert "stop_grace_periods" in check_compose(wrong).stdout


def test_compose_names_files_that_exist_and_flags_that_octavo_knows() -> None:
    services = compose()["services"]
    build = services["octavo"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    volumes = set()
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), f"{name}: {source}"
            else:
                volumes.add(source)
        assert set(service.get("secrets", ())) <= set(compose()["secrets"])
    assert volumes == set(compose()["volumes"])
    config = options_of(services["octavo"]["command"])
    assert seconds(services["octavo"]["stop_grace_period"]) >= config.shutdown_timeout + ROOM


def test_prometheus_scrapes_the_service_of_compose_with_its_key() -> None:
    conf = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    service = compose()["services"]["prometheus"]
    (job,) = conf["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["octavo:8000"]}]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{service['secrets'][0]}"
    targets = {mount.split(":")[1] for mount in service["volumes"]}
    assert f"/etc/prometheus/{conf['rule_files'][0]}" in targets


def test_grafana_finds_the_dashboard_of_compose() -> None:
    mounts = compose()["services"]["grafana"]["volumes"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert any(mount.split(":")[1] == f"{provider['options']['path']}/octavo.json" for mount in mounts)
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"


# -- Kubernetes


def manifest(kind: str) -> dict[str, Any]:
    (found,) = (one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text()) if one["kind"] == kind)
    result: dict[str, Any] = found
    return result


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_schema(path: Path) -> None:
    for one in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(one, "1.30", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**one, "specs": {}}, "1.30", strict=True)


def test_manifests_fit_one_another() -> None:
    deployment, service = manifest("Deployment"), manifest("Service")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [port["name"] for port in container["ports"]]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [manifest("PersistentVolumeClaim")["metadata"]["name"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    secret = manifest("Secret")
    for variable in container["env"]:
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == secret["metadata"]["name"]
        assert reference["key"] in secret["stringData"] or reference["optional"]


def test_a_pod_has_time_to_start_and_to_end() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = options_of(container["args"])
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait + config.shutdown_timeout + ROOM
    assert container["ports"][0]["containerPort"] == config.port
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900


def test_probes_ask_what_they_mean() -> None:
    """While the model loads a pod is alive and not ready; then it is both. Neither needs a key."""
    (container,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    loaded = threading.Event()
    with running(parts_of(ScriptEngine(), loaded), wait=False, api_key=("k",)) as url, probing(url) as probe:
        assert {name: probe(path) for name, path in paths.items()} == {
            "startup": 503,
            "readiness": 503,
            "liveness": 200,
        }
        loaded.set()
        while probe(paths["readiness"]) != 200:
            pass
        assert probe(paths["startup"]) == probe(paths["liveness"]) == 200


@contextmanager
def probing(url: str) -> Iterator[Any]:
    with httpx.Client(base_url=url) as client:
        yield lambda path: client.get(path).status_code


def test_the_image_and_the_pod_agree_on_the_user_and_the_folders() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user, group = instructions("USER")[-1].split(":")
    security = pod["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {*instructions("VOLUME"), "/tmp"}
