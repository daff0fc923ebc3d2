"""What of a request's schemas is not enforced, told in a header of the answer. Under `strict` such
a schema is refused before (requests/tool_fields.py).

    x-ridgeline-unenforced: uniqueItems at #/properties/tags, not at tools.search#
"""

from __future__ import annotations

import json
from urllib.parse import quote

from ridgeline.engine.requests.schema_keywords import unenforced
from ridgeline.server.protocol.requests.asked import Asked

UNENFORCED = "x-ridgeline-unenforced"
MAX_CHARACTERS = 1000
HARMLESS = "/#$~. ,:;=()[]{}'*!?@&+|<>"  # in a header, beside letters and digits


def unenforced_in(asked: Asked) -> str:
    """The header's value; empty where all is enforced, or nothing is asked for."""
    lapses = [str(lapse) for lapse in _of_answer(asked)] + _of_tools(asked)
    text = quote(", ".join(lapses), safe=HARMLESS)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "..."


def _of_answer(asked: Asked) -> list[object]:
    grammar = None if asked.sampling is None else asked.sampling.grammar
    if grammar is None or grammar.kind != "json_schema":
        return []
    return list(unenforced(json.loads(grammar.text)))


def _of_tools(asked: Asked) -> list[str]:
    """Calls of tools follow a schema where they must be made, or the answer has a form."""
    conversation, sampling = asked.conversation, asked.sampling
    if conversation is None or sampling is None:
        return []
    is_held = conversation.choice.is_forced or sampling.grammar is not None
    return [
        f"{lapse.keyword} at tools.{tool.name}{lapse.path}"
        for tool in conversation.usable_tools
        if is_held and conversation.choice.name in (None, tool.name)
        for lapse in unenforced(tool.parameters)
    ]
