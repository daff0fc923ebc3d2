"""Answers of /v1/completions. A choice's index is its prompt's number × n + its sample's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Completion, Delta, Output
from ridgeline.server.protocol.replies.logprobs import Columns, TokenTexts
from ridgeline.server.protocol.replies.reply import ChunkReply, check_ended_well, usage_of
from ridgeline.server.protocol.replies.sse import compact, quoted
from ridgeline.server.protocol.requests.asked import ParsedPrompt


class CompletionReply(ChunkReply):
    prefix = "cmpl-"
    chunk_object = "text_completion"

    def prepare(self) -> None:
        asked, prompts, tokenizer = self.asked, self.prompts, self.tokenizer
        sampling = prompts[0].sampling
        self._n, num = sampling.n, sampling.n * len(prompts)
        self._echoes = bool(asked.request.echo)
        self._only_echoes = asked.request.max_tokens == 0
        self._wants_logprobs = sampling.logprobs is not None
        self._texts = TokenTexts(tokenizer)
        self._columns: dict[int, Columns] = {}
        self.prepare_chunks(num)
        self._text_heads = [
            f'data: {self.head}{{"index":{index},"text":'.encode() for index in range(num)
        ]
        self._text_tail = f',"logprobs":null,"finish_reason":null}}{self.tail}\n\n'.encode()

    def start(self) -> list[bytes]:
        if not (self._echoes or self.asked.returns_ids):
            return []
        return [
            self._first_chunk(number * self._n + sample, prompt)
            for number, prompt in enumerate(self.prompts)
            for sample in range(self._n)
        ]

    def _first_chunk(self, index: int, prompt: ParsedPrompt) -> bytes:
        content = f'"text":{quoted(prompt.text)}'
        if self.asked.returns_ids:
            content += f',"prompt_token_ids":{compact(prompt.ids)}'
        return self.chunk(index, content, "null", None)

    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        index = prompt * self._n + delta.sample
        text = "" if self._only_echoes else delta.text
        logprobs = "null"
        if self._wants_logprobs and delta.logprobs:
            columns = self._columns_of(index)
            logprobs = compact(columns.of(delta.tokens, delta.logprobs))
        if self.has_extras:
            self.note_tokens(index, () if self._only_echoes else delta.tokens)
        if delta.finish_reason is None and logprobs == "null":
            if not text:
                return b""
            if self.has_extras:
                return self._chunk(index, text)
            return self._text_heads[index] + quoted(text).encode() + self._text_tail
        self.ended[index] = delta.finish_reason is not None
        reason = "length" if self._only_echoes else delta.finish_reason
        return self._chunk(index, text, logprobs, reason)

    def finish(self, outputs: Sequence[Output]) -> list[bytes]:
        events = [
            self._chunk(index, "", finish_reason=made.finish_reason or "stop")
            for index, made in enumerate(made for output in outputs for made in output.completions)
            if not self.ended[index]
        ]
        return [*events, *self.last_events(self._usage(outputs))]

    def whole(self, outputs: Sequence[Output]) -> bytes:
        check_ended_well(outputs)
        choices = [
            self._choice(number, sample, output, made)
            for number, output in enumerate(outputs)
            for sample, made in enumerate(output.completions)
        ]
        return self.whole_body("text_completion", choices, self._usage(outputs))

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return usage_of(outputs, 0 if self._only_echoes else None)

    def _columns_of(self, index: int) -> Columns:
        if index not in self._columns:
            self._columns[index] = Columns(self.tokenizer, self._texts)
        return self._columns[index]

    def _chunk(
        self, index: int, text: str, logprobs: str = "null", finish_reason: str | None = None
    ) -> bytes:
        return self.chunk(index, f'"text":{quoted(text)}', logprobs, finish_reason)

    def _choice(self, number: int, sample: int, output: Output, made: Completion) -> dict[str, Any]:
        prompt = self.prompts[number]
        text = "" if self._only_echoes else made.text
        choice = {
            "index": number * self._n + sample,
            "text": prompt.text + text if self._echoes else text,
            "logprobs": self._logprobs(prompt, output, made),
            "finish_reason": "length" if self._only_echoes else made.finish_reason or "stop",
        }
        if not self.asked.returns_ids:
            return choice
        tokens = () if self._only_echoes else made.tokens
        return {**choice, "prompt_token_ids": prompt.ids, "token_ids": tokens}

    def _logprobs(
        self, prompt: ParsedPrompt, output: Output, made: Completion
    ) -> dict[str, Any] | None:
        if made.logprobs is None:
            return None
        tokens, logprobs = list(made.tokens), list(made.logprobs)
        if self._only_echoes:
            tokens, logprobs = [], []
        before = output.prompt_logprobs if self._echoes else None
        columns = Columns(self.tokenizer, self._texts)
        if before is None:
            return columns.of(tokens, logprobs)
        return columns.of([*prompt.ids, *tokens], [*before, *logprobs])
