"""docs/security.md is true: its numbers are those of the code, and its flags exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ridgeline.data import template_sandbox
from ridgeline.engine.grammars.compile_process import MAX_BYTES
from ridgeline.engine.grammars.compile_queue import CompileLimits
from ridgeline.engine.requests import grammar, repetitions, request
from ridgeline.formats.api_keys import LEAST_KEY
from ridgeline.formats.fields import flag_of
from ridgeline.server import native_relay
from ridgeline.server.config import BODY_BYTES_A_TOKEN, MIB, ServerConfig
from ridgeline.server.door.wire import WireBounds
from ridgeline.server.exchange import _REQUEST_ID
from ridgeline.server.listening import PROBE_BOUNDS
from ridgeline.server.protocol.limits import RequestLimits
from ridgeline.server.protocol.requests import body
from ridgeline.server.protocol.requests import fields as bodies
from ridgeline.server.serving import BODIES_TOTAL

TEXT = (Path(__file__).parents[2] / "docs/security.md").read_text()
DEFAULTS = {entry.name: entry.default for entry in fields(ServerConfig)}
BOUNDS = {  # the beginning of a table's row, and the numbers in its second column
    "open connections": [DEFAULTS["max_connections"]],
    "requests of one key at a time": [DEFAULTS["max_per_key"]],
    "outputs that wait": [DEFAULTS["max_waiting"]],
    "body": [BODY_BYTES_A_TOKEN, ServerConfig().max_body_bytes(0) // MIB],
    "seconds to send a body": [DEFAULTS["client_timeout"]],
    "seconds without a step": [DEFAULTS["step_timeout"]],
    "seconds for running requests": [DEFAULTS["drain_seconds"]],
    "request line and headers": [WireBounds.max_head_bytes >> 10],
    "seconds to send them": [WireBounds.head_s],
    "bodies being read": [BODIES_TOTAL // MIB],
    "depth of the JSON": [RequestLimits.max_depth],
    "lists and objects in a body": [body.MAX_CONTAINERS],
    "entries of one object": [body.MAX_ENTRIES],
    "messages of a conversation": [bodies.MAX_MESSAGES],
    "prompts of a request": [bodies.MAX_PROMPTS],
    "outputs of a request": [RequestLimits.max_outputs],
    "tools": [bodies.MAX_TOOLS],
    "stop strings": [bodies.MAX_STOPS, bodies.MAX_STOP_CHARACTERS],
    "likeliest tokens": [request.MAX_LOGPROBS],
    "biased tokens": [request.MAX_BIASED],
    "characters of a grammar": [grammar.MAX_CHARACTERS],
    "repetitions in a regex": [repetitions.MAX_REPETITIONS],
    "counts in a schema": [repetitions.MAX_COUNT],
    "memory for compiling one grammar": [MAX_BYTES // MIB],
    "grammars of one key": [CompileLimits.max_slow_per_tenant, CompileLimits.max_slow],
    "seconds that a slow grammar": [CompileLimits.in_all_s],
    "seconds of compiling one grammar": [DEFAULTS["grammar_timeout"]],
    "seconds for a chat template": [template_sandbox.MAX_SECONDS],
    "seconds of a `deadline_s`": [bodies.DAY_S],
    "characters of a request's id": [64],
    "connections of the probe port": [PROBE_BOUNDS.max_connections],
    "seconds to send a request on the probe port": [PROBE_BOUNDS.head_s],
}


@pytest.mark.parametrize("row", BOUNDS)
def test_numbers_are_those_of_the_code(row: str) -> None:
    cells = re.findall(rf"^\| {re.escape(row)}[^|]*\| ([^|]*) \|", TEXT, re.M)
    assert len(cells) == 1, cells
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", cells[0].rstrip(","))]
    assert numbers == BOUNDS[row]


def test_all_else_that_has_a_number() -> None:
    assert f"at least {LEAST_KEY} printable ASCII" in TEXT
    assert _REQUEST_ID.fullmatch("a" * 64)
    assert not _REQUEST_ID.fullmatch("a" * 65)
    assert DEFAULTS["requests_per_minute"] is DEFAULTS["tokens_per_minute"] is None
    assert DEFAULTS["host"] == "127.0.0.1"
    assert f"cut to {native_relay.MAX_CHARACTERS:,} characters" in TEXT


def test_every_bound_that_a_flag_sets_is_on_the_page() -> None:
    flags = {flag_of(entry) for entry in fields(ServerConfig)}
    named = set(re.findall(r"`--([a-z-]+)`", TEXT))
    assert named <= flags
    bounds = {flag for flag in flags if re.match(r"max-|.*-timeout|.*-seconds|.*-per-minute", flag)}
    assert bounds <= named
