"""Answers of /v1/embeddings: unit vectors, as lists of numbers or base64 of little-endian fp32."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ridgeline.engine import Output
from ridgeline.server.protocol.errors import SERVER_ERROR, ApiError
from ridgeline.server.protocol.replies.reply import Reply, check_ended_well, usage_of
from ridgeline.server.protocol.replies.sse import compact


class EmbeddingReply(Reply):
    """Never streamed: it has only `whole`."""

    def whole(self, outputs: Sequence[Output]) -> bytes:
        check_ended_well(outputs)
        usage = usage_of(outputs, 0)
        usage = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        answer = {
            "object": "list",
            "data": [self._entry(index, output) for index, output in enumerate(outputs)],
            "model": self.asked.model,
            "usage": usage,
        }
        return compact(answer).encode()

    def _entry(self, index: int, output: Output) -> dict[str, Any]:
        assert output.embedding is not None, "a finished embedding is there"
        if not bool(output.embedding.isfinite().all()):
            raise ApiError(
                503, "the model's hidden states are not numbers (NaN)", type=SERVER_ERROR
            )
        return {"object": "embedding", "index": index, "embedding": self._vector(output.embedding)}

    def _vector(self, embedding: Tensor) -> str | list[float]:
        if self.asked.request.encoding_format == "base64":
            values = embedding.float().contiguous().numpy().astype("<f4")
            return base64.b64encode(values.tobytes()).decode()
        numbers: list[float] = embedding.tolist()
        return numbers
