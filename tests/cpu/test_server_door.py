"""Who is let in, and how many: keys, origins, the gate, the server's flags."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from ridgeline.errors import UsageError
from ridgeline.formats.api_keys import ApiKey, read_keys
from ridgeline.server.config import ServerConfig, with_environment
from ridgeline.server.door.gate import Gate
from ridgeline.server.door.keys import Caller, Keys
from ridgeline.server.door.origin import Origins
from ridgeline.server.door.rates import Rates
from ridgeline.server.door.refusals import RefusalError, retry_after
from ridgeline.server.exchange import Bodies, clean_request_id
from ridgeline.server.listening import bind, is_local, url_of


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_keys() -> None:
    keys = Keys([ApiKey("first-key", name="first"), ApiKey("second:key")])
    first, second = keys.caller_of("Bearer first-key"), keys.caller_of("bearer  second:key ")
    assert first == Caller("first")
    assert second is not None
    assert second.tenant.startswith("key-")
    assert "second" not in second.tenant
    assert keys.caller_of(basic("anybody", "first-key")) == first
    assert keys.caller_of(basic("", "second:key")) == second
    assert keys.caller_of(None, "first-key") == first
    wrong = (None, "", "Bearer", "Bearer ", "Bearer first-ke", "first-key", "Basic !", "Basic a===")
    for given in (*wrong, basic("first-key", ""), "Bearer first-key second:key", "Bearer é"):
        assert keys.caller_of(given) is None, given
    assert keys.caller_of("Bearer unused", "first-key") == first
    assert keys.caller_of("Bearer unused", "first-ke") is None
    assert "first-key" not in repr(ApiKey("first-key"))


def test_without_keys_everybody_is_one_caller_who_sees_all() -> None:
    keys = Keys()
    assert not keys.are_required
    assert keys.caller_of(None) == Caller("", is_admin=True)
    assert Caller("", is_admin=True).visible_tenant is None
    assert Caller("search").visible_tenant == "search"


def test_two_keys_of_one_name_may_do_the_same() -> None:
    """While one replaces the other."""
    keys = Keys([ApiKey("old-key-1", "search"), ApiKey("new-key-1", "search")])
    assert keys.caller_of("Bearer old-key-1") == keys.caller_of("Bearer new-key-1")
    with pytest.raises(UsageError, match="'search' and may do different things"):
        keys.use([ApiKey("old-key-1", "search"), ApiKey("new-key-1", "search", is_admin=True)])
    assert keys.caller_of("Bearer old-key-1") is not None  # as it was


def test_keys_of_flags_and_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nkey-number-one\n\n  key-number-two name=two admin \n")
    config = ServerConfig(
        api_key=("key-number-three",), admin_key=("key-number-four",), api_key_file=(str(path),)
    )
    keys = config.api_keys()
    assert [key.secret.rpartition("-")[2] for key in keys] == ["three", "four", "one", "two"]
    assert [key.is_admin for key in keys] == [False, True, False, True]
    assert keys[3].name == "two"
    path.write_text("# none yet\n")
    for wrong, message in (
        (ServerConfig(api_key_file=(str(path),)), "has no keys"),
        (ServerConfig(api_key_file=(str(tmp_path / "nothing"),)), "cannot read"),
        (ServerConfig(api_key=("",)), "at least 8"),
        (ServerConfig(api_key=("with a space",)), "ASCII"),
        (ServerConfig(api_key=("schlüssel-eins",)), "ASCII"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong.api_keys()
    with pytest.raises(UsageError, match="port is 70000"):
        ServerConfig(port=70000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("short", "line 2: an API key of 5 characters"),
        ("secret-key-1 name=", "line 2: the name of a key"),
        ("secret-key-1 name=a/b", "line 2: the name of a key"),
        ("secret-key-1 requests-per-minute=0", "line 2: requests-per-minute needs a whole number"),
        ("secret-key-1 tokens-per-minute=many", "line 2: tokens-per-minute needs a whole number"),
        ("secret-key-1 request-per-minute=5", "did you mean 'requests-per-minute='"),
        ("secret-key-1 secret-key-2", "line 2: an option of a key is not known"),
    ],
)
def test_a_wrong_line_is_named_and_not_shown(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_keys(path)
    assert message in str(caught.value)
    assert "secret-key" not in str(caught.value)


def test_keys_of_the_environment() -> None:
    config = with_environment(
        ServerConfig(api_key=("key-of-a-flag",)),
        {"RIDGELINE_API_KEY": "first-key second-key", "RIDGELINE_ADMIN_KEY": "third-key\n"},
    )
    assert config.api_key == ("key-of-a-flag", "first-key", "second-key")
    assert [key.is_admin for key in config.api_keys()] == [False, False, False, True]
    assert with_environment(ServerConfig(), {}) == ServerConfig()
    for empty in ("", " "):  # of a script whose own variable is missing
        with pytest.raises(UsageError, match="RIDGELINE_API_KEY is set but empty"):
            with_environment(ServerConfig(), {"RIDGELINE_API_KEY": empty})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root_path": "llm"}, "begin it with /"),
        ({"root_path": "/llm/"}, "begin it with /"),
        ({"root_path": "/a?b"}, "begin it with /"),
        ({"tls_cert": "cert.pem"}, "go together"),
        ({"port": 8000, "probe_port": 8000}, "the server's own port"),
        ({"served_model_name": ("a", "a")}, "twice"),
        ({"served_model_name": ("",)}, "printable"),
        ({"served_model_name": ("a\nb",)}, "printable"),
        ({"requests_per_minute": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServerConfig(**changes)


def test_rates_are_a_bucket_that_fills() -> None:
    now = [0.0]
    rates = Rates(requests_per_minute=60, clock=lambda: now[0])
    caller, other = Caller("a"), Caller("b", requests_per_minute=1)
    for _ in range(60):  # a burst
        rates.count_request(caller)
    with pytest.raises(RefusalError) as caught:
        rates.count_request(caller)
    assert retry_after(caught.value) == 1
    assert "60 requests per minute; try again in 1 s" in caught.value.message
    now[0] += 1.0  # one more each second
    rates.count_request(caller)
    with pytest.raises(RefusalError):
        rates.count_request(caller)
    rates.count_request(other)
    with pytest.raises(RefusalError) as caught:
        rates.count_request(other)
    assert retry_after(caught.value) == 60
    now[0] += 3600.0  # no more than a minute's worth is saved up
    for _ in range(60):
        rates.count_request(caller)
    with pytest.raises(RefusalError):
        rates.count_request(caller)


def test_tokens_beyond_a_minute_are_owed() -> None:
    now = [0.0]
    rates = Rates(tokens_per_minute=600, clock=lambda: now[0])
    caller = Caller("a")
    rates.count_tokens("a", 10**6)  # of a time without limits
    rates.count_request(caller)
    rates.count_tokens("a", 1200)
    with pytest.raises(RefusalError) as caught:
        rates.count_request(caller)
    assert "600 tokens per minute" in caught.value.message
    assert retry_after(caught.value) == 61  # 600 are owed, and one is to be left
    now[0] += 61.0
    rates.count_request(caller)
    rates.count_tokens("a", 100)
    with pytest.raises(RefusalError):
        rates.count_request(caller)
    rates.count_request(caller._replace(tokens_per_minute=None, tenant="b"))
    rates.keep({"b"})
    rates.count_request(caller)  # its key was gone in between


def test_limits_that_were_changed_hold_at_once() -> None:
    rates = Rates(clock=lambda: 0.0)
    caller = Caller("a", requests_per_minute=10)
    for _ in range(5):
        rates.count_request(caller)
    doubled = caller._replace(requests_per_minute=20)
    for _ in range(10):  # half of it is left, as before
        rates.count_request(doubled)
    with pytest.raises(RefusalError):
        rates.count_request(doubled)
    rates.count_request(Caller("a"))


def test_origins() -> None:
    own = Origins()
    own.check("localhost:8000", None, True)
    own.check("127.0.0.1:8000", "http://127.0.0.1:8000", True)
    own.check("[::1]:8000", "http://[::1]:8000", True)
    own.check("10.0.0.7", None, True)
    own.check("llm.example.org", "https://llm.example.org", False)
    own.check(None, None, True)  # HTTP/1.0
    for host, origin, is_open in (
        ("localhost:8000", "http://evil.example", True),
        ("localhost:8000", "http://localhost:9000", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "http://[", False),
        (None, "null", False),
        ("evil.example:8000", None, True),
        ("evil.example:8000", "http://evil.example:8000", True),  # a name that was rebound
        ("[", None, True),
    ):
        with pytest.raises(RefusalError) as caught:
            own.check(host, origin, is_open)
        assert caught.value.status == 403
    assert own.headers("http://evil.example") == own.headers(None) == {}


def test_allowed_origins() -> None:
    """Scheme, host and port have to match; a default port is none, and case does not matter."""
    some = Origins(("HTTPS://Chat.Example.org:443", "http://localhost:3000", "app://notes"))
    for origin in ("https://chat.example.org", "http://localhost:3000", "app://notes"):
        some.check("10.0.0.7", origin, False)
        assert some.headers(origin)["access-control-allow-origin"] == origin
        assert some.headers(origin)["vary"] == "origin"
    for origin in ("http://chat.example.org", "https://chat.example.org:8443", "null", "*"):
        with pytest.raises(RefusalError):
            some.check("10.0.0.7", origin, False)
        assert some.headers(origin) == {"vary": "origin"}
    every = Origins(("*", "http://localhost:3000"))
    for origin in ("http://evil.example", "null"):
        every.check("localhost:8000", origin, True)
        assert every.headers(origin)["access-control-allow-origin"] == "*"
        assert "vary" not in every.headers(origin)
    with pytest.raises(RefusalError):  # the name is another matter than the page
        every.check("evil.example", "http://evil.example", True)
    for wrong in ("", "chat.example.org", "https://a/path", "https://u:p@a", "https://[", "null"):
        with pytest.raises(UsageError, match="is not an origin"):
            Origins((wrong,))


def test_preflight_headers_are_names_and_nothing_else() -> None:
    names = Origins(("*",)).preflight_headers("authorization, content-type")
    assert names["access-control-allow-headers"] == "authorization, content-type"
    assert "access-control-allow-headers" not in Origins(("*",)).preflight_headers(None)
    for wrong in ("a b", "a\u00e9", "a:b", ",", "a" * 5000):
        with pytest.raises(RefusalError) as caught:
            Origins(("*",)).preflight_headers(wrong)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_where_it_listens(host: str, local: bool) -> None:
    with bind(host, 0) as bound:
        assert is_local(bound) == local
        assert url_of(bound).startswith("http://")
        assert url_of(bound, has_tls=True).startswith("https://")


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
