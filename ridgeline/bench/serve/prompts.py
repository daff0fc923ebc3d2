"""A workload's requests as bodies for an OpenAI endpoint.

What a server's tokenizer makes of a text is not known here, so that prompts are words that most
vocabularies have as one token each; what the server counted is in the answers. With a tokenizer at
hand, prompts have exactly the tokens that the workload asks for. Where requests of a workload begin
alike, their words do. Another `seed` gives other prompts with the same lengths and the same
sharing: what a server kept of the last round helps it nothing in the next.

    make = BodyMaker("chat", "model-name")
    make.body(workload, index=3, seed=1)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from ridgeline.data import Tokenizer
from ridgeline.data.workload import Workload

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/chat/completions", "completions": "/completions"}

COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were her all she there would their we him been has when who will "
    "more no if out so said what up its about into than them can only other new some could time "
    "these two may then do first any my now such like our over man me even most made after also "
    "did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get "
    "here between both life being under never day same another know while last might us great old "
    "year off come since against go came right used take three"
)
WORDS = COMMON.split()

# Not every server knows these; serve_endpoint.py finds out.
OPTIONS = {"ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class BodyMaker:
    api: Api
    model: str
    tokenizer: Tokenizer | None = None
    without: tuple[str, ...] = ()  # options that the server refuses

    def body(self, workload: Workload, index: int, seed: int = 0) -> bytes:
        """Of one request: streamed, with as many tokens as the workload says."""
        request = workload.requests[index]
        text: dict[str, Any]
        prompt = self._prompt(workload, index, seed)
        if self.api == "chat":
            text = {"messages": [{"role": "user", "content": prompt}]}
        else:
            text = {"prompt": prompt}
        body = {
            "model": self.model,
            **text,
            "max_tokens": request.num_output_tokens,
            "temperature": workload.temperature,
            "stream": True,
            **{name: value for name, value in OPTIONS.items() if name not in self.without},
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def _prompt(self, workload: Workload, index: int, seed: int) -> str | list[int]:
        if self.tokenizer is None:
            words = prompt_ids(workload, index, len(WORDS), seed)
            return " ".join(WORDS[number] for number in words)
        ids = prompt_ids(workload, index, self.tokenizer.vocab_size, seed)
        return ids if self.api == "completions" else self.tokenizer.decode(ids)

    def but_without(self, *names: str) -> BodyMaker:
        return replace(self, without=(*self.without, *names))


def prompt_ids(workload: Workload, index: int, vocab_size: int, seed: int) -> list[int]:
    """Ids below `vocab_size`. Those that the workload gives itself are kept for seed 0 where they
    fit, and moved for another: what was alike stays alike.
    """
    given = workload.requests[index].prompt
    if given is None:
        return workload.prompt_ids(index, vocab_size, seed)
    return [(number + seed * 7919) % vocab_size for number in given]
