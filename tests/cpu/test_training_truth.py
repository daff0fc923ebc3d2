"""The plain training loop: its gradients are transformers', on every family, and documents that
share a batch leave each other alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed import draw, pack
from tiny_models import MODELS
from tiny_models import make_model as make_peer

from ridgeline.models import Transformer
from ridgeline.quantization import load_model
from ridgeline.training.documents import PackedDocuments, reference_attention, sdpa_attention
from ridgeline.training.naive import naive_gradients, naive_loss

DOCUMENTS = draw(21, 5, 13)
NUM_COUNTED = 20 + 4 + 12


def peer_gradients(peer: Any, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers' loss and gradients, summed document by document. The gradients are saved as if
    they were weights and loaded into our model, which gives them our names and our fused shapes.
    """
    total = torch.zeros(())
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        total = total + peer(ids, labels=ids).loss * (len(document) - 1)
    loss = total / NUM_COUNTED
    loss.backward()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(parameter.grad)
    peer.save_pretrained(folder)
    named = load_model(folder, dtype="fp32", device="cpu").named_parameters()
    return loss.item(), dict(named)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = make_peer(name)
    peer.save_pretrained(tmp_path / "weights")
    ours = load_model(tmp_path / "weights", dtype="fp32", device="cpu")
    loss, expected = peer_gradients(peer, tmp_path / "gradients")
    batch = [pack(*DOCUMENTS)]
    assert naive_loss(ours, batch).item() == pytest.approx(loss, abs=1e-5)
    gradients = naive_gradients(ours, batch)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert gradient.abs().max() > 0, parameter
        torch.testing.assert_close(
            gradient, expected[parameter], atol=1e-5, rtol=1e-5, msg=lambda text: f"{name}: {text}"
        )


@pytest.fixture(scope="module", params=["llama-tied", "gemma2", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_peer(request.param).save_pretrained(folder)
    return load_model(folder, dtype="fp32", device="cpu").requires_grad_(True)


def hidden_and_input_gradients(
    model: Transformer, document: list[int], other: list[int], attend: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A document's hidden states, and the gradients of their squares at every token's embedding,
    with another document before it and behind it.
    """
    batch = pack(other, document, other)
    embedded: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    with model.embed.register_forward_hook(keep):
        hidden = model(batch.ids, PackedDocuments(batch.positions, batch.starts, attend))
    kept = hidden[len(other) : -len(other)]
    kept.square().sum().backward()
    assert embedded[0].grad is not None
    return kept.detach(), embedded[0].grad


@pytest.mark.parametrize("attend", [reference_attention, sdpa_attention])
def test_another_document_changes_not_a_bit(model: Transformer, attend: Any) -> None:
    document, one, other = DOCUMENTS[0], *draw(9, 9, seed=1)
    hidden, gradients = hidden_and_input_gradients(model, document, one, attend)
    again, gradients_again = hidden_and_input_gradients(model, document, other, attend)
    assert torch.equal(hidden, again)
    assert torch.equal(gradients, gradients_again)
    assert not gradients[:9].any()
    assert not gradients[-9:].any()
    assert gradients[9:-9].any(1).all()


def test_attention_by_torch_is_the_reference(model: Transformer) -> None:
    batch = pack(*DOCUMENTS)
    both = [
        model(batch.ids, PackedDocuments(batch.positions, batch.starts, attend))
        for attend in (reference_attention, sdpa_attention)
    ]
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)
