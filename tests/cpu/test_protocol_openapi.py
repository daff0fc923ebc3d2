"""The OpenAPI document: it says what the parser does, and tools can read it."""

import json
import re
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from api_outputs import MODEL, limits_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.pagination import SyncPage
from openai.types import Model
from test_protocol_requests import ASKED, NAMES, REFUSED, VALUES, WRONG
from tiny_tokenizers import demo

from ridgeline.server.protocol import (
    PATHS,
    ROUTES,
    ApiError,
    Route,
    model_body,
    models_body,
    openapi_document,
    parse,
)


@cache
def document() -> dict[str, Any]:
    return openapi_document("1.2.3", models=[MODEL])


@cache
def validator(route: Route) -> Any:
    operation = document()["paths"][PATHS[route]]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document()["components"]}
    assert jsonschema_rs.meta.is_valid(whole)
    return jsonschema_rs.Draft202012Validator(whole)


def refusal_of(route: Route, value: Any) -> ApiError | None:
    try:
        parse(route, json.dumps(value).encode(), limits_of(demo()))
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_is_described(route: Route) -> None:
    operation = document()["paths"][PATHS[route]]["post"]
    statuses = set(operation["responses"])
    assert statuses == {"200", "400", "401", "404", "408", "413", "429", "503"}
    streams = "text/event-stream" in operation["responses"]["200"]["content"]
    assert streams == (route in ("chat", "completions", "responses", "messages"))
    assert validator(route).is_valid({"model": MODEL, **ASKED[route]})


def test_keys_are_described_where_there_are_any() -> None:
    assert "security" not in document()
    with_key = openapi_document("1", has_key=True)
    assert with_key["security"] == [{"key": []}, {"x-api-key": []}]
    assert with_key["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize(("route", "name", "value"), REFUSED)
def test_what_is_refused_is_not_described(route: Route, name: str, value: Any) -> None:
    assert not validator(route).is_valid({"model": MODEL, **ASKED[route], name: value})


@settings(max_examples=120, deadline=None)
@given(
    route=st.sampled_from(ROUTES),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
)
def test_what_the_document_forbids_is_refused(route: Route, changes: dict[str, Any]) -> None:
    body = {"model": MODEL, **ASKED[route], **changes}
    if refusal_of(route, body) is None:
        assert validator(route).is_valid(body)


# Bounds that need the model or another field: the document cannot say them.
BEYOND: dict[Route, set[str]] = {
    "chat": {"logit_bias", "stop_token_ids", "top_logprobs", "stream_options", "tool_choice"}
    | {"tools", "messages", "chat_template_kwargs"},
    "completions": {"prompt", "max_tokens"},
    "messages": {"messages", "tools", "tool_choice", "stop_token_ids", "logit_bias"},
    "count_tokens": {"messages", "tools", "tool_choice"},
    "tokenize": {"messages", "prompt"},
    "detokenize": {"tokens"},
}


@pytest.mark.parametrize(("route", "name", "value", "param"), WRONG)
def test_bounds_are_described(route: Route, name: str, value: Any, param: str) -> None:
    body = {"model": MODEL, **ASKED[route], name: value}
    is_described = not validator(route).is_valid(body)
    assert is_described or name in BEYOND[route]


# Fields whose values can be at odds with another field's.
AT_ODDS = {"max_tokens", "min_tokens", "best_of", "n", "echo", "top_logprobs", "stream_options"}
AT_ODDS |= {"include", "add_special_tokens", "add_generation_prompt", "tools", "tool_choice"}
AT_ODDS |= {"messages", "input", "continue_final_message", "reasoning", "reasoning_effort"}
AT_ODDS |= {"response_format", "structured_outputs", "text", "chat_template_kwargs"}
AT_ODDS |= {f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}
AT_ODDS |= {"enable_thinking", "thinking", "thinking_token_budget", "thinking_budget"}


@pytest.mark.parametrize("route", ROUTES)
def test_requests_made_from_the_document(route: Route) -> None:
    """They are taken, or refused for what the document cannot say."""
    operation = schemathesis.openapi.from_dict(document())[PATHS[route]]["POST"]
    quiet = {"suppress_health_check": list(HealthCheck), "database": None, "deadline": None}

    @settings(max_examples=6, derandomize=True, **quiet)
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        error = refusal_of(route, case.body)
        if error is not None and " is false;" not in error.message:  # which it takes for 0
            assert error.param is not None
            field = re.split(r"[.\[]", error.param)[0]
            assert field in AT_ODDS | BEYOND.get(route, set()), error.message

    send()


def test_the_list_of_models() -> None:
    listed = SyncPage[Model].model_validate(json.loads(models_body(["a", "b"], 5.5, 100)))
    assert [(model.id, model.created) for model in listed.data] == [("a", 5), ("b", 5)]
    one = Model.model_validate(json.loads(model_body("b", ["a", "b"], 5.5, 100)))
    assert (one.id, one.object) == ("b", "model")
    with pytest.raises(ApiError) as caught:
        model_body("c", ["a", "b"], 5.5, 100)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
