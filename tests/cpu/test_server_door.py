"""Who is let in, and how many: keys, origins, the gate, the server's flags."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from ridgeline.errors import UsageError
from ridgeline.server.config import ServerConfig
from ridgeline.server.door.gate import Gate
from ridgeline.server.door.keys import Keys
from ridgeline.server.door.origin import check_origin
from ridgeline.server.door.refusals import RefusalError, retry_after
from ridgeline.server.exchange import Bodies, clean_request_id
from ridgeline.server.serving import bind, is_local, url_of


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_keys() -> None:
    keys = Keys(("first-key", "second:key"))
    first, second = keys.tenant_of("Bearer first-key"), keys.tenant_of("bearer  second:key ")
    assert first is not None
    assert second is not None
    assert first != second
    assert "first" not in first
    assert keys.tenant_of(basic("anybody", "first-key")) == first
    assert keys.tenant_of(basic("", "second:key")) == second
    wrong = (None, "", "Bearer", "Bearer ", "Bearer first-ke", "first-key", "Basic !", "Basic a===")
    for given in (*wrong, basic("first-key", ""), "Bearer first-key second:key", "Bearer é"):
        assert keys.tenant_of(given) is None, given
    assert Keys(()).tenant_of(None) == ""
    assert not Keys(()).are_asked_for


def test_keys_of_flags_and_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nkey-number-one\n\n  key-number-two \n")
    config = ServerConfig(api_key=("key-number-three",), api_key_file=str(path))
    assert config.keys() == ("key-number-three", "key-number-one", "key-number-two")
    path.write_text("# none yet\n")
    for wrong, message in (
        (ServerConfig(api_key_file=str(path)), "has no keys"),
        (ServerConfig(api_key_file=str(tmp_path / "nothing")), "cannot read"),
        (ServerConfig(api_key=("",)), "at least 8"),
        (ServerConfig(api_key=("with a space",)), "ASCII"),
        (ServerConfig(api_key=("schlüssel-eins",)), "ASCII"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong.keys()
    with pytest.raises(UsageError, match="port is 70000"):
        ServerConfig(port=70000)


def test_origins() -> None:
    check_origin("localhost:8000", None, True)
    check_origin("127.0.0.1:8000", "http://127.0.0.1:8000", True)
    check_origin("[::1]:8000", "http://[::1]:8000", True)
    check_origin("10.0.0.7", None, True)
    check_origin("llm.example.org", "https://llm.example.org", False)
    check_origin(None, None, True)  # HTTP/1.0
    for host, origin, is_open in (
        ("localhost:8000", "http://evil.example", True),
        ("localhost:8000", "http://localhost:9000", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "http://[", False),
        ("evil.example:8000", None, True),
        ("evil.example:8000", "http://evil.example:8000", True),  # a name that was rebound
        ("[", None, True),
    ):
        with pytest.raises(RefusalError) as caught:
            check_origin(host, origin, is_open)
        assert caught.value.status == 403


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_where_it_listens(host: str, local: bool) -> None:
    with bind(ServerConfig(host=host, port=0)) as bound:
        assert is_local(bound) == local
        assert url_of(bound).startswith("http://")


def test_the_gate_counts_outputs_and_requests_of_a_key() -> None:
    gate = Gate(max_running=4, max_waiting=2, max_per_tenant=3)
    places = [gate.enter("a") for _ in range(3)]
    with pytest.raises(RefusalError) as caught:
        gate.enter("a")
    assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
    assert retry_after(caught.value) == 1
    other = gate.enter("b")
    other.widen(3)
    assert gate.num_inside == 6
    with pytest.raises(RefusalError) as caught:
        gate.enter("c")
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    with pytest.raises(RefusalError):
        places[0].widen(2)
    other.leave()
    other.leave()
    assert (gate.num_inside, gate.num_requests) == (3, 3)
    for place in places:
        place.leave()
    huge = gate.enter("c")
    huge.widen(1000)  # alone it may
    assert gate.num_inside == 6
    huge.leave()
    assert (gate.num_inside, gate.num_requests) == (0, 0)
    gate.is_closed = True
    with pytest.raises(RefusalError) as caught:
        gate.enter("a")
    assert caught.value.status == 503
    assert retry_after(caught.value) == 5


def test_bodies_are_bounded_each_and_all_together() -> None:
    bodies = Bodies(max_bytes=100, max_total=150)
    bodies.take(100, 100)
    with pytest.raises(RefusalError) as caught:
        bodies.take(60, 60)
    assert caught.value.status == 503
    bodies.give_back(100)
    bodies.take(60, 60)
    with pytest.raises(RefusalError) as caught:
        bodies.take(50, 101)
    assert caught.value.status == 413


def test_request_ids_are_clean() -> None:
    assert clean_request_id("trace-1.a_b:C") == "trace-1.a_b:C"
    for given in (None, "", "a" * 65, 'a"b', "a b", "a\nb", "é", "-a"):
        made = clean_request_id(given)
        assert made != given
        assert made.startswith("req-")
