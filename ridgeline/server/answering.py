"""From a request's body to its answer: parsed and tokenized in a thread, run by the engine, sent
whole or piece by piece. Whatever happens it has an answer, unless its client has gone, and then the
engine stops working on it.

    await answering.answer(exchange, "chat")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ridgeline.data import Tokenizer
from ridgeline.engine import Output
from ridgeline.server.door.gate import Gate, GateEntry
from ridgeline.server.door.refusals import ClientGoneError
from ridgeline.server.exchange import Bodies, Exchange
from ridgeline.server.mailbox import Mailbox, Taken, Writer
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.protocol import (
    ApiError,
    Asked,
    ParsedPrompt,
    Reply,
    RequestLimits,
    Route,
    StreamedReply,
    answer_now,
    error_of,
    parse,
    render,
    reply_for,
)
from ridgeline.server.protocol.lapses import UNENFORCED, unenforced_in
from ridgeline.server.pump import Pump, Ticket

Result = TypeVar("Result")
IGNORED = "x-ridgeline-ignored-fields"  # in an answer: fields of the request that nobody knows
MAX_HEADER = 1024  # characters of it
# A body so short is read in less time than it takes to hand it to a thread and back, unless it has
# a format or tools, which may take any time.
LIGHT_BYTES = 2048
HEAVY_WORDS = (b"json", b"schema", b"regex", b"grammar", b"choice", b"tools", b"functions")
NOW: tuple[Route, ...] = ("tokenize", "detokenize", "count_tokens")  # answered without the engine


@dataclass(frozen=True)
class Answering:
    pump: Pump
    gate: Gate
    bodies: Bodies
    meters: Meters
    tokenizer: Tokenizer
    limits: RequestLimits
    threads: ThreadPoolExecutor  # for what would keep the event loop
    log_prompts: bool = False

    async def answer(self, exchange: Exchange, route: Route) -> None:
        self.gate.check(exchange.tenant)  # before its body is read
        body = await exchange.body(self.bodies)
        if self.log_prompts:
            exchange.facts["body"] = body.decode("utf-8", "replace")
        if route not in NOW:
            self.pump.check_up()
        place = self.gate.enter(exchange.tenant)
        try:
            await self._answer_inside(exchange, route, body, place)
        finally:
            place.leave()

    async def _answer_inside(
        self, exchange: Exchange, route: Route, body: bytes, place: GateEntry
    ) -> None:
        if route in NOW:
            asked, answer = await self.in_thread(self._now, route, body)
            _note_ignored(exchange, asked)
            await exchange.answer(200, answer)
            return
        if _is_light(body):
            asked, prompts, lapses = self._prepared(route, body)
        else:
            asked, prompts, lapses = await self.in_thread(self._prepared, route, body)
        _note_ignored(exchange, asked)
        if lapses:
            exchange.more_headers[UNENFORCED] = lapses
        num_outputs = sum(prompt.sampling.num_samples for prompt in prompts)
        place.widen(num_outputs)
        num_tokens = sum(len(prompt.ids) for prompt in prompts)
        exchange.facts |= {"prompt_tokens": num_tokens, "stream": asked.stream}
        self.meters.arrived(
            exchange.request_id, exchange.scope["path"], exchange.tenant, exchange.began
        )
        try:
            reply = reply_for(asked, prompts, self.tokenizer, exchange.request_id)
            async with self._running(exchange, asked, prompts) as mailbox:
                self.meters.admitted(exchange.request_id, num_tokens, num_outputs)
                if asked.stream:
                    assert isinstance(reply, StreamedReply), f"{route} has no streams"
                    await self._send_stream(exchange, reply, mailbox)
                else:
                    await self._send_whole(exchange, reply, mailbox)
        except BaseException as error:
            status = "cancelled" if isinstance(error, ClientGoneError) else "failed"
            self.meters.ended(exchange.request_id, status, type(error).__name__)  # type: ignore[arg-type]
            raise

    def _now(self, route: Route, body: bytes) -> tuple[Asked, bytes]:
        asked = parse(route, body, self.limits)
        return asked, answer_now(asked, self.tokenizer, self.limits)

    def _prepared(self, route: Route, body: bytes) -> tuple[Asked, list[ParsedPrompt], str]:
        asked = parse(route, body, self.limits)
        return asked, render(asked, self.tokenizer, self.limits), unenforced_in(asked)

    @asynccontextmanager
    async def _running(
        self, exchange: Exchange, asked: Asked, prompts: Sequence[ParsedPrompt]
    ) -> AsyncIterator[Mailbox]:
        """In the engine, for as long as somebody waits for it."""
        mailbox = Mailbox(len(prompts), asked.stream)
        due = None if asked.deadline_s is None else exchange.began + asked.deadline_s
        salt = f"{exchange.tenant}/{asked.cache_salt}"
        ticket = Ticket(
            exchange.request_id,
            prompts,
            mailbox,
            asked.priority,
            due,
            salt,
            exchange.tenant,
        )
        watching = asyncio.create_task(_watch(exchange, mailbox))
        self.pump.submit(ticket)
        try:
            yield mailbox
        finally:
            self.pump.release(ticket)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _send_whole(self, exchange: Exchange, reply: Reply, mailbox: Mailbox) -> None:
        await mailbox.take()
        outputs = mailbox.outputs()
        self._note_end(exchange, outputs)
        _raise_if_failed(outputs)
        await exchange.answer(200, await self.in_thread(reply.whole, outputs))

    async def _send_stream(
        self, exchange: Exchange, reply: StreamedReply, mailbox: Mailbox
    ) -> None:
        """Nothing is sent before something has come: until then an error has a status."""
        taken = await mailbox.take()
        if mailbox.has_all:
            _raise_if_failed(mailbox.outputs())
        await exchange.begin_stream()
        data, writer = b"".join(reply.start()), _writer_for(exchange, reply)
        try:
            while True:
                data += b"".join([reply.delta(delta, prompt) for prompt, delta in taken])
                if mailbox.is_complete:
                    break
                await exchange.write(data)
                data, taken = b"", await mailbox.take(writer)
            outputs = mailbox.outputs()
            self._note_end(exchange, outputs)
            _raise_if_failed(outputs)
        except ApiError as error:
            exchange.facts |= {"code": error.code, "failed": error.status}
            await exchange.end_stream(data + reply.failed(error))
            self.meters.ended(exchange.request_id, "failed", error.code or "failed")
            return
        await exchange.end_stream(data + b"".join(reply.finish(outputs)))

    def _note_end(self, exchange: Exchange, outputs: Sequence[Output]) -> None:
        num_tokens = sum(len(part.tokens) for output in outputs for part in output.completions)
        worst = next((output for output in outputs if output.status != "finished"), outputs[0])
        exchange.facts |= {
            "output_tokens": num_tokens,
            "end": worst.reason if worst.status == "finished" else worst.status,
        }
        firsts = [output.first_token_s for output in outputs if output.first_token_s is not None]
        if firsts:
            exchange.facts["first_token_s"] = round(min(firsts), 4)
        engine_s = [output.engine_first_token_s for output in outputs]
        if engine_s and engine_s[0] is not None:
            exchange.facts["engine_first_token_s"] = round(engine_s[0], 6)
        self.meters.ended(exchange.request_id, worst.status, worst.reason)

    async def in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


def _is_light(body: bytes) -> bool:
    return len(body) <= LIGHT_BYTES and not any(word in body for word in HEAVY_WORDS)


def _writer_for(exchange: Exchange, reply: StreamedReply) -> Writer:
    """Sends what has come without a task, where the connection takes it."""

    def write(take: Callable[[], Taken]) -> bool:
        if not exchange.can_write:
            return False
        exchange.write_now(b"".join([reply.delta(delta, prompt) for prompt, delta in take()]))
        return True

    return write


def _note_ignored(exchange: Exchange, asked: Asked) -> None:
    if asked.ignored:
        names = ", ".join(asked.ignored)[:MAX_HEADER].encode("ascii", "replace").decode()
        exchange.more_headers[IGNORED] = names
        exchange.facts["ignored"] = names


async def _watch(exchange: Exchange, mailbox: Mailbox) -> None:
    await exchange.until_gone()
    mailbox.fail(ClientGoneError())


def _raise_if_failed(outputs: Sequence[Output]) -> None:
    for output in outputs:
        error = error_of(output)
        if error is not None:
            raise error
