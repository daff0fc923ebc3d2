"""Checkpoints of a run on a GPU: copied beside the steps, with the values of their moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import make_folder
from train_runs import make_text, same_bytes

from ridgeline.cli import main
from ridgeline.training.saving import saver as saving


def test_copies_beside_steps_are_what_waiting_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = make_folder(tmp_path / "model", tie_word_embeddings=True), make_text(tmp_path)
    made = list[int]()
    plain = saving.HostCopies.__init__

    def noted(copies: saving.HostCopies, tensors: list[saving.Tensor]) -> None:
        plain(copies, tensors)
        made.append(copies.num_bytes)

    monkeypatch.setattr(saving.HostCopies, "__init__", noted)
    for name, patched in (("beside", False), ("waiting", True)):
        with pytest.MonkeyPatch.context() as patch:
            if patched:
                patch.setattr(saving, "available_memory", lambda device: 0)
            status = main([
                "train", str(model), "--data", str(text), "--out", str(tmp_path / name),
                "--device", "cuda", "--precision", "bf16", "--deterministic", "--steps", "6",
                "--save-every", "2", "--keep", "9", "--batch", "4", "--sequence-length", "16",
                "--warmup", "1",
            ])  # fmt: skip
        assert status == 0
    assert len(made) == 1
    for name in ("step-00000002", "step-00000004", "step-00000006"):
        same_bytes(
            tmp_path / "beside" / "checkpoints" / name, tmp_path / "waiting" / "checkpoints" / name
        )
