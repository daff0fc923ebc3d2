"""Makes a server's cache of pages as large as it gets: pages take memory when they are first
written, so that only then can be told whether it grows for another reason.
"""

from __future__ import annotations

import asyncio

from soak.raw_http import exchange, post
from soak.server_process import ServerProcess

WORDS = "one two three four five six seven " * 250
AT_ONCE = 8
MOST = 60  # rounds


async def fill_pages(server: ServerProcess) -> None:
    """Long prompts that differ from their first word on, until no page is free."""
    for start in range(0, MOST * AT_ONCE, AT_ONCE):
        bodies = [
            {"model": server.model, "prompt": f"{number} {WORDS}", "max_tokens": 1}
            for number in range(start, start + AT_ONCE)
        ]
        data = [post("/v1/completions", body) for body in bodies]
        await asyncio.gather(*(exchange(server.port, each, timeout_s=300.0) for each in data))
        free = await asyncio.to_thread(server.metric, 'ridgeline:kv_pages{state="free"}')
        if free < 3 and start > 0:  # the first look may be older than the first prompt
            break
