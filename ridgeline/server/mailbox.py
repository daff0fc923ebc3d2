"""What has come for one HTTP request and was not sent yet. A client that lags gets fewer, larger
pieces: deltas of one output that wait are merged, so that what waits is never more than the rest of
the answer.

    mailbox = Mailbox(num_prompts=1, wants_deltas=True)
    mailbox.put(0, event)                        # from the event loop
    mailbox.flush()                              # behind what came together
    while not mailbox.is_complete:
        for prompt, delta in await mailbox.take(): ...
    mailbox.outputs()

Waking a task for every token is most of what a token costs a server. Whoever gives `take` a writer
is not woken while that writer can send at once what comes.

For the event loop's thread alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ridgeline.engine import Delta, Output
from ridgeline.engine.sampling.outputs import Event
from ridgeline.server.protocol import ApiError, merged

Taken = list[tuple[int, Delta]]  # prompts, and what came for them
Writer = Callable[[Callable[[], Taken]], bool]  # takes and sends, or leaves all and says False


class Mailbox:
    def __init__(self, num_prompts: int, wants_deltas: bool) -> None:
        self._wants_deltas = wants_deltas
        self._waiting: dict[tuple[int, int], list[Delta]] = {}  # by prompt and sample
        self._outputs: dict[int, Output] = {}
        self._num_prompts = num_prompts
        self._news = asyncio.Event()
        self._writer: Writer | None = None  # while somebody waits in `take`
        self.error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """All outputs are there, and all deltas were taken."""
        return len(self._outputs) == self._num_prompts and not self._waiting

    @property
    def has_all(self) -> bool:
        return len(self._outputs) == self._num_prompts

    @property
    def missing(self) -> list[int]:
        """The prompts without an output."""
        return [prompt for prompt in range(self._num_prompts) if prompt not in self._outputs]

    def put(self, prompt: int, event: Event) -> None:
        """`flush` says that this was all for now."""
        if isinstance(event, Output):
            self._outputs[prompt] = event
        elif self._wants_deltas:
            key = (prompt, event.sample)
            deltas = self._waiting.get(key)
            if deltas is None:
                self._waiting[key] = [event]
            else:
                deltas.append(event)

    def flush(self) -> None:
        """Send what has come, or wake whoever waits for it."""
        if not (self._waiting or self._outputs):
            return
        if self._writer is not None and not self.has_all:
            try:
                if self._writer(self._take_waiting):
                    return
            except Exception as error:
                self.fail(error)
        self._wake()

    def fail(self, error: ApiError | Exception) -> None:
        """End the waiting with an error; the first one counts."""
        self.error = self.error or error
        self._wake()

    async def take(self, writer: Writer | None = None) -> Taken:
        """What has come, one delta an output; waited for if there is nothing. Meanwhile `writer`
        may send what comes. Raises the error that `fail` was given.
        """
        while True:
            if self.error is not None:
                raise self.error
            if self._waiting or self.has_all:
                return self._take_waiting()
            self._news.clear()
            self._writer = writer
            await self._news.wait()

    def outputs(self) -> list[Output]:
        """Of all prompts, in their order."""
        return [self._outputs[prompt] for prompt in range(self._num_prompts)]

    def _take_waiting(self) -> Taken:
        taken, self._waiting = self._waiting, {}
        return [(prompt, _joined(deltas)) for (prompt, _), deltas in taken.items()]

    def _wake(self) -> None:
        self._writer = None  # until it waits again: nothing may overtake what it sends
        self._news.set()


def _joined(deltas: list[Delta]) -> Delta:
    """In pairs, so that long ones are not copied once for each short one."""
    while len(deltas) > 1:
        pairs = zip(deltas[::2], deltas[1::2], strict=False)
        odd = deltas[-1:] if len(deltas) % 2 else []
        deltas = [*(merged(first, second) for first, second in pairs), *odd]
    return deltas[0]
