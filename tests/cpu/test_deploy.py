"""The container and Compose files, which nothing here can run: their form is right, the files they
name are there, and the flags they give are those of `ridgeline serve`.
"""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.cli import serve
from ridgeline.cli.arguments.options import from_flags
from ridgeline.cli.arguments.parser import Parser
from ridgeline.server.config import KEY_VARIABLES, ServerConfig
from ridgeline.server.metrics.dashboard import dashboard

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    *("FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL"),
    *("HEALTHCHECK", "ENTRYPOINT", "CMD", "ARG", "LABEL"),
}
SERVICE = {
    *("build", "image", "command", "secrets", "ports", "volumes", "environment", "depends_on"),
    *("restart", "stop_grace_period"),
}


def instructions() -> list[tuple[str, str]]:
    """Of the container file, lines that go on joined."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in pairs]


def words_of(instruction: str) -> list[str]:
    (text,) = (rest for word, rest in instructions() if word == instruction)
    words = json.loads(text)
    assert all(isinstance(word, str) for word in words)
    return list(words)


def parsed(words: list[str]) -> Namespace:
    """As `ridgeline serve` takes them."""
    parser = Parser(prog="ridgeline serve")
    serve.add_arguments(parser)
    return parser.parse_args(words)


def compose() -> dict[str, Any]:
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(document, dict)
    return document


def test_the_container_file_has_the_form_of_one() -> None:
    steps = instructions()
    assert steps[0][0] == "FROM"
    assert {word for word, _ in steps} <= INSTRUCTIONS
    stages = [rest.split(" AS ")[1] for word, rest in steps if word == "FROM" and " AS " in rest]
    for word, rest in steps:
        if word == "COPY":
            *sources, _ = rest.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages
            else:
                assert all((ROOT / source).exists() for source in sources), rest
        if word == "RUN":
            assert shlex.split(rest)
        if word == "ENV":
            assert all("=" in part for part in shlex.split(rest))
    users = [rest for word, rest in steps if word == "USER"]
    assert users == ["ridgeline"]  # not root


def test_what_is_copied_is_let_through() -> None:
    text = (DEPLOY / "Containerfile.dockerignore").read_text()
    allowed = {line.removeprefix("!") for line in text.splitlines() if line.startswith("!")}
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from=")
        for source in rest.split()[:-1]
    }
    assert copied == allowed


def test_the_containers_command_is_one_of_ours() -> None:
    entry = words_of("ENTRYPOINT")
    assert entry[:2] == ["ridgeline", "serve"]
    args = parsed([*entry[2:], *words_of("CMD")])
    config = from_flags(args, ServerConfig)
    exposed = next(rest for word, rest in instructions() if word == "EXPOSE").split()
    assert exposed == [str(config.port), str(config.probe_port)]
    assert config.host == "0.0.0.0"
    check = next(rest for word, rest in instructions() if word == "HEALTHCHECK")
    assert f"http://127.0.0.1:{config.probe_port}/health" in check
    (words,) = re.findall(r"CMD (\[.*\])", check)
    compile(json.loads(words)[2], "healthcheck", "exec")
    extras = set(
        re.findall(r"\[([a-z,]+)\]\"", (DEPLOY / "Containerfile").read_text())[0].split(",")
    )
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))


def test_compose_has_the_form_of_one() -> None:
    document = compose()
    assert set(document) == {"name", "services", "secrets", "volumes"}
    services = document["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    used_secrets, used_volumes = set(), set()
    for service in services.values():
        assert set(service) <= SERVICE
        assert set(service.get("depends_on", [])) <= set(services)
        used_secrets |= set(service.get("secrets", []))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            else:
                used_volumes.add(source)
    assert used_secrets == set(document["secrets"])
    assert used_volumes == set(document["volumes"])
    build = services["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Containerfile"
    for secret in document["secrets"].values():  # made by whoever starts it, and never committed
        assert secret["file"].startswith("./secrets/")
        assert secret["file"].removeprefix("./") in (DEPLOY / "compose.yaml").read_text()


def test_composes_command_is_one_of_ours() -> None:
    words = compose()["services"]["server"]["command"]
    config = from_flags(parsed([*words_of("ENTRYPOINT")[2:], *words]), ServerConfig)
    assert config.api_key_file == ("/run/secrets/keys",)
    text = (DEPLOY / "Containerfile").read_text()
    assert "RIDGELINE_API_KEY" in KEY_VARIABLES
    assert "-e RIDGELINE_API_KEY" in text
    grace = int(compose()["services"]["server"]["stop_grace_period"].rstrip("s"))
    assert grace > config.drain_seconds


def test_prometheus_reads_the_servers_metrics() -> None:
    document = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = document["scrape_configs"]
    assert set(job) == {"job_name", "metrics_path", "authorization", "static_configs"}
    assert job["metrics_path"] == "/metrics"
    (targets,) = (entry["targets"] for entry in job["static_configs"])
    assert targets == ["server:8000"]
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in compose()["services"]["prometheus"]["secrets"]


def test_grafana_shows_the_dashboard() -> None:
    folder = DEPLOY / "grafana"
    assert json.loads((folder / "dashboards/ridgeline.json").read_text()) == dashboard()
    source = yaml.safe_load((folder / "provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "provisioning/dashboards/ridgeline.yaml").read_text())[
        "providers"
    ]
    volumes = compose()["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes


@pytest.mark.parametrize("name", ["deploy", "tests", "docs"])
def test_the_package_has_none_of_it(name: str) -> None:
    assert not (ROOT / "ridgeline" / name).exists()
    text = (ROOT / "pyproject.toml").read_text()
    assert 'include = ["ridgeline*"]' in text
