"""kopf's side of the operator: watches in, keys out. The one module that knows kopf.

Only `on.event` handlers are used: they put neither finalizers nor annotations on objects, so that an uninstalled
operator leaves nothing that hangs. What happened does not matter, only to whom: `reconcile` looks for itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import kopf

from paceline_operator import names
from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable
from paceline_operator.kube import Credentials
from paceline_operator.ownership import controller

# kopf logs every event that it hands over; what we do about them is ours to log.
logging.getLogger("kopf.objects").setLevel(logging.WARNING)

_PODS: Final = ("v1", "pods")
_CHILD_RESOURCES: Final = (
    ("v1", "configmaps"),
    ("v1", "services"),
    ("apps", "v1", "deployments"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("autoscaling", "v2", "horizontalpodautoscalers"),
)
_OURS: Final = f"{names.LABEL_MANAGED_BY}={names.LABEL_MANAGED_BY_VALUE}"

# A watch ends by itself now and then, and is given up when nothing at all arrives, so that a connection that was cut
# without a word is noticed within about a minute.
_SERVER_TIMEOUT: Final = 240  # seconds
_CLIENT_TIMEOUT: Final = 300  # seconds
_CONNECT_TIMEOUT: Final = 10  # seconds
_REQUEST_TIMEOUT: Final = 60  # seconds
_FIRST_DELAYS: Final = (1, 2, 4, 8)  # seconds
_DELAY: Final = 15  # seconds


class _Delays:
    """Seconds before each repetition of a request, without end.

    At the end of a list kopf ends, and the operator with it: also where a right to watch is missing, which the operator
    has to tell of in every status, and to outlive.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(_FIRST_DELAYS, itertools.repeat(_DELAY))


async def watch(
    namespaces: tuple[str, ...], enqueue: Callable[[Key], None], login: Callable[[], Awaitable[Credentials]]
) -> None:
    """Watch services, their children and their pods until cancelled, and name the service that each event concerns.

    Raises what kopf cannot recover from, or ClusterUnavailable should it end by itself. kopf gets a thread and an event
    loop of its own: it takes over the signals of the main thread, and at its end it cancels every task of its loop that
    it did not find there at its start.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()

    def enqueue_from_thread(key: Key) -> None:
        loop.call_soon_threadsafe(enqueue, key)

    watching = asyncio.create_task(
        asyncio.to_thread(_watch_in_thread, _registry(enqueue_from_thread, login), namespaces, stop)
    )
    try:
        await asyncio.shield(watching)
        raise ClusterUnavailable("the watches have ended by themselves")
    finally:
        stop.set()
        await asyncio.gather(watching, return_exceptions=True)


def _watch_in_thread(registry: Any, namespaces: tuple[str, ...], stop: threading.Event) -> None:
    operator = kopf.operator(
        registry=registry,
        settings=_settings(namespaces),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        identity="paceline",  # or kopf looks up the user's name, and a pod's user may have none
        stop_flag=stop,
    )
    asyncio.run(operator)


def _settings(namespaces: tuple[str, ...]) -> Any:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # our events are about transitions, not about kopf's log
    settings.watching.server_timeout = _SERVER_TIMEOUT
    settings.watching.client_timeout = _CLIENT_TIMEOUT
    settings.watching.connect_timeout = _CONNECT_TIMEOUT
    for resource in (_PODS, *_CHILD_RESOURCES):
        # By the API server: a cluster has many objects that are none of ours, and they change all the time.
        settings.watching.label_selectors[resource] = _OURS
    # Namespaces that are named need not be looked for, and a list of all of them is not for everybody to read.
    settings.scanning.disabled = bool(namespaces)
    settings.networking.request_timeout = _REQUEST_TIMEOUT
    settings.networking.error_backoffs = _Delays()
    return settings


def _registry(enqueue: Callable[[Key], None], login: Callable[[], Awaitable[Credentials]]) -> Any:
    """A registry of our own: kopf's default one is global and would keep handlers of other runs."""
    registry = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> Any:
        return _connection(await login())

    async def service_changed(namespace: str, name: str, **_: Any) -> None:
        enqueue(Key(namespace, name))

    async def child_changed(body: Mapping[str, Any], **_: Any) -> None:
        if key := _owner_key(body):
            enqueue(key)

    async def pod_changed(body: Mapping[str, Any], **_: Any) -> None:
        if key := _pod_key(body):
            enqueue(key)

    kopf.on.login(registry=registry)(log_in)
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)(service_changed)
    for resource in _CHILD_RESOURCES:
        kopf.on.event(*resource, id="/".join(resource), registry=registry)(child_changed)
    kopf.on.event(*_PODS, registry=registry)(pod_changed)
    return registry


def _connection(credentials: Credentials) -> Any:
    return kopf.ConnectionInfo(
        server=credentials.server,
        ca_path=credentials.authority,
        token=credentials.token,
        certificate_path=credentials.certificate,
        private_key_path=credentials.private_key,
        insecure=credentials.insecure,
    )


def _owner_key(child: Mapping[str, Any]) -> Key | None:
    """The service that a child belongs to, whichever of its incarnations."""
    owner = controller(child)
    is_service = (owner.get("apiVersion"), owner.get("kind")) == (names.API_VERSION, names.KIND)
    return Key(child["metadata"]["namespace"], owner["name"]) if is_service else None


def _pod_key(pod: Mapping[str, Any]) -> Key | None:
    """The service that a pod says to belong to: its name may be longer than a label can carry."""
    name = pod["metadata"].get("annotations", {}).get(names.ANNOTATION_SERVICE)
    return Key(pod["metadata"]["namespace"], name) if name else None
