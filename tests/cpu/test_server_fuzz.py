"""Whatever the server's own OpenAPI document allows, and what it does not, is answered: never with
a 5xx but 503, and never in a form that the document does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from live_server import LiveServer, live_server, until
from schemathesis import checks

from ridgeline.server.routes import document

MAX_EXAMPLES = 20  # of each of the operations

schema = schemathesis.openapi.from_dict(document(has_key=False))
checks.load_all_checks()
CHECKS = [
    checks.CHECKS.get_one(f"{name}_conformance")
    for name in ("response_schema", "status_code", "content_type")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("fuzz"), max_context=48) as found:
        yield found
        until(found.is_idle)
        assert found.engine.num_restarts == 0


@pytest.mark.sweep(keep=1)
@schema.parametrize()
@settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_everything_is_answered(case: Any, server: LiveServer) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"  # or nothing behind the name would be looked at
    answer = case.call(base_url=server.url)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    is_stream = answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer, checks=CHECKS[1:] if is_stream else CHECKS)
