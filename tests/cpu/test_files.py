"""Atomic writes: the file is whole or as it was, whatever happens in between."""

import errno
import os
from pathlib import Path

import pytest

from ridgeline.errors import OutputError, UsageError
from ridgeline.formats.files import atomic_write, reject_unknown_keys

pytestmark = pytest.mark.smoke


def test_writes_text_and_bytes_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.txt"
    with atomic_write(path) as file:
        file.write("héllo")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "héllo"
    with atomic_write(path, "wb") as file:
        file.write(b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert os.listdir(path.parent) == ["c.txt"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    plain, atomic = tmp_path / "plain", tmp_path / "atomic"
    plain.write_text("")
    with atomic_write(atomic):
        pass
    assert atomic.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with (
        pytest.raises(OutputError, match=r"out\.json: No space left on device"),
        atomic_write(path) as file,
    ):
        file.write("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_write_that_fails_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), atomic_write(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, UsageError])
def test_other_errors_pass_through_and_leave_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), atomic_write(tmp_path / "x") as file:
        raise error(f"stopped after {file.write('half')} characters")
    assert os.listdir(tmp_path) == []


def test_an_input_that_is_missing_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"input\.txt") as caught,
        atomic_write(tmp_path / "x"),
    ):
        (tmp_path / "other" / "input.txt").read_text()
    assert not isinstance(caught.value, OutputError)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_a_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"), atomic_write(tmp_path / "file" / "x"):
        pass


def test_unknown_keys_list_near_matches() -> None:
    reject_unknown_keys(["values"], ["values", "notes"], "a record")
    with pytest.raises(
        UsageError, match="a record has an unknown key 'valuse'; did you mean 'values'"
    ):
        reject_unknown_keys(["valuse"], ["values", "notes"], "a record")
