"""What a server allows in a request, and what it is called: the numbers that parsing checks against.

The size of a body and the number of connections are the front's; here is what is inside a body.

    Limits(models=("demo",), max_context=8192, vocab_size=49152)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    models: tuple[str, ...]  # names under which the model is served; the first is its own
    max_context: int  # tokens of prompt and output together
    vocab_size: int  # token ids in a request are below it
    max_depth: int = 64  # of lists and objects in a body
    max_stops: int = 16  # stop strings of a request
    max_stop_characters: int = 256  # of one stop string
    max_messages: int = 4096  # of a conversation, or items of an input
    max_prompts: int = 256  # prompts of a request, or inputs to embed
    max_outputs: int = 128  # n and best_of, and prompts × best_of
    max_tools: int = 128
    max_characters: int = 8_000_000  # of one text
    max_schema_characters: int = 200_000  # of a JSON schema, written as JSON
    max_deadline_s: float = 86_400.0
