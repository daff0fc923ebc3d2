"""No field is accepted and ignored: each that a route takes is shown, through HTTP, to change what
it promises, or is named in docs/serve.md as one that passes without effect.

The fields are found by walking the models that check requests, so a new one fails here until it has
a case. To add one, write a function under `@case(owners, fields...)` in one of the files
tests/field_cases*.py. `owners` are routes ("chat") or, for an object inside a request, the name of
its class ("StreamOptions"). The function is given the server (`Api` in tests/field_audit.py) and,
where it takes a second argument, the owner; it sends requests with the field and without it, and
asserts what changed. A field that passes and changes nothing is `no_effect(...)`, and docs/serve.md
names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import field_audit
import pytest
from field_audit import CASES, Api, accepted_fields, audited_server

for path in Path(field_audit.__file__).parent.glob("field_cases*.py"):
    import_module(path.stem)
FIELDS = sorted(accepted_fields())


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with audited_server(tmp_path_factory.mktemp("fields")) as started:
        yield started


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_does_what_it_promises(api: Api, field: str) -> None:
    assert field in CASES, f"{field} is accepted and has no case: see the top of this file"
    api.show(field)


def test_cases_are_for_fields_that_exist() -> None:
    assert sorted(CASES.keys() - set(FIELDS)) == []
    assert len(FIELDS) == len(set(FIELDS))
