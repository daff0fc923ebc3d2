"""The workflows and templates of .github, which nothing here can run: their form is right, and what
they call exists.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
ACTIONS = {  # each by the major version that is used, and the inputs that it takes
    "actions/checkout@v4": set(),
    "actions/setup-python@v5": {"python-version", "cache", "cache-dependency-path"},
    "actions/upload-artifact@v4": {"name", "path"},
}

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def steps(path: Path) -> list[dict[str, Any]]:
    return [
        step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]
    ]


@each_workflow
def test_a_workflow_has_the_form_of_one(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    # `on` is YAML's word for true
    assert set(document) <= {"name", True, "permissions", "concurrency", "env", "jobs"}
    assert set(document[True]) <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    assert document["permissions"] == {"contents": "read"}
    for job in document["jobs"].values():
        assert set(job) <= {"name", "runs-on", "timeout-minutes", "strategy", "steps"}
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert set(step) in ({"uses"}, {"uses", "with"}, {"run"})


@each_workflow
def test_expressions_name_what_is_there(path: Path) -> None:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        keys = set(matrix) - {"include"} | {key for row in matrix.get("include", []) for key in row}
        assert set(re.findall(r"\${{ matrix\.(\w+) }}", str(job))) == keys


@each_workflow
def test_steps_call_what_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(path):
        if "uses" in step:
            assert set(step.get("with", {})) <= ACTIONS[step["uses"]]
            if "cache-dependency-path" in step.get("with", {}):
                assert (ROOT / step["with"]["cache-dependency-path"]).exists()
        elif step["run"].startswith("make "):
            assert step["run"].split()[1] in targets
        else:
            files = re.findall(r"tests/\S+", step["run"])
            assert files
            assert all((ROOT / file).exists() for file in files)


def test_x86_and_arm_are_tested() -> None:
    runs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    machines = {row["os"] for row in runs["strategy"]["matrix"]["include"]}
    assert machines == {"ubuntu-24.04", "ubuntu-24.04-arm"}
    assert {"run": "make test"} in runs["steps"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_the_form_of_one(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert set(document) == {"name", "description", "labels", "body"}
    identifiers = [part["id"] for part in document["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for part in document["body"]:
        assert part["type"] == "textarea"
        assert part["attributes"]["label"]
