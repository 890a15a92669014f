"""GET /prefixes: the hot prefixes of this replica, for a new one. Used by `app`; read by `engine.handover`.

The list holds what clients have asked. It is there only where the replicas share a secret, and for nobody else; API
keys of tenants do not open it.
"""

from __future__ import annotations

import hmac
import os

from aiohttp import web

from paceline_server.engine.handover import SECRET_VARIABLE, prefixes_json
from paceline_server.errors import NotServed
from paceline_server.gateway.state import GATEWAY


async def hot_prefixes(request: web.Request) -> web.Response:
    """The list, to who knows the secret.

    Raises:
        NotServed: there is no secret, or another one was sent; the two look alike.
        EngineUnavailable: no engine is ready.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not secret or not hmac.compare_digest(sent.encode(errors="surrogateescape"), secret.encode()):
        raise NotServed("this server hands out no prefixes, or not to you", code="not_found")
    gateway = request.app[GATEWAY]
    found = await gateway.engine.prefixes(gateway.config.kv_cache.handover.max_prefixes)
    return web.json_response(prefixes_json(found))
