"""The OpenAPI document, made from the models that check the requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def openapi_document(version: str, *, has_key: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1; `has_key` where requests need an API key."""
    raise NotImplementedError


def models_body(models: Sequence[str], created: float, max_context: int) -> bytes:
    """The answer of GET /v1/models."""
    raise NotImplementedError


def model_body(name: str, models: Sequence[str], created: float, max_context: int) -> bytes:
    """The answer of GET /v1/models/{name}. Raises ApiError (404) for one that is not served."""
    raise NotImplementedError
