"""The Kubernetes API as a few verbs on JSON: the one module that knows the Kubernetes client.

Used by `kube_cluster` and `lease` of the operator, and by the metrics adapter as its `ObjectSource`. Paths are those of
the REST API, such as /apis/apps/v1/namespaces/default/deployments/web.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import aiohttp
from kubernetes.aio import client, config

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.errors import ClusterUnavailable, RequestRefused, StaleObservation

_TIMEOUT: Final = aiohttp.ClientTimeout(total=20, sock_connect=5)
_CONNECTIONS: Final = 32  # requests in flight at the same time
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

_JSON: Final = "application/json"
_APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
_MERGE: Final = "application/merge-patch+json"
_LONGEST_TEXT: Final = 500  # bytes shown of an answer that is no Status object

# Refusals that are about the moment, not about the request: the namespace goes away, or an apply named the uid of an
# object that has been replaced.
_STALE_WORDS: Final = ("because it is being terminated", "metadata.uid: Invalid value")
# Answers of 500 that are about the moment: the API server waits for its store, or for the store's new leader.
_STORE_REASON: Final = "ServerTimeout"
_STORE_WORDS: Final = "etcdserver: "


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to reach the API server, for clients other than this one (kopf). Paths are of files that exist."""

    server: str
    authority: str | None
    token: str | None
    certificate: str | None
    private_key: str | None
    insecure: bool


class KubeClient:
    """A connection to one API server.

    Every method raises ClusterUnavailable when the server cannot be reached, is overloaded or failed inside, and
    RequestRefused when it says no: to an apply or a deletion, any answer of its own that is not about the moment.
    """

    def __init__(self, configuration: client.Configuration) -> None:
        self._configuration = configuration
        self._api = client.ApiClient(configuration)
        self._api.user_agent = names.FIELD_MANAGER

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> Self:
        """Connect with this kubeconfig; without one as the pod's service account, else with the user's kubeconfig.

        Must run inside the event loop that will use the client. Raises ClusterUnavailable without credentials.
        """
        configuration = client.Configuration()
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = None  # the queue retries, with back-off
        try:
            if kubeconfig is None and _SERVICE_ACCOUNT.exists():
                config.load_incluster_config(client_configuration=configuration)
            else:
                await config.load_kube_config(kubeconfig, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise ClusterUnavailable(
                f"no credentials for a cluster ({error}): run this in a pod of the chart, or name a kubeconfig with "
                "--kubeconfig or KUBECONFIG"
            ) from error
        return cls(configuration)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def __aenter__(self) -> Self:
        """Nothing to do: connections are opened when they are needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.close()

    async def credentials(self) -> Credentials:
        """The credentials as they are now; a service account's token changes every hour."""
        header = await self._configuration.get_api_key_with_prefix("BearerToken")
        return Credentials(
            server=self._configuration.host,
            authority=self._configuration.ssl_ca_cert,
            token=header.split()[-1] if header else None,  # after "Bearer", or "bearer" from a service account
            certificate=self._configuration.cert_file,
            private_key=self._configuration.key_file,
            insecure=not self._configuration.verify_ssl,
        )

    async def read_object(self, path: str) -> Manifest | None:
        """Read one object as it is now; None when it does not exist."""
        return await self._request("GET", path)

    async def list_objects(
        self, path: str, label_selector: str | None = None, *, field_selector: str | None = None, fresh: bool = False
    ) -> list[Manifest]:
        """List a collection: as it is now (`fresh`), or as the API server's cache has it, which costs it less.

        A collection that does not exist (its CRD is not installed) is empty.
        """
        query = {
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
            "resourceVersion": None if fresh else "0",
        }
        answer = await self._request("GET", path, query={key: value for key, value in query.items() if value})
        return _with_types(answer) if answer else []

    async def create_object(self, path: str, manifest: Manifest) -> Manifest:
        """Create an object in a collection. Raises StaleObservation when it exists already."""
        created = await self._request("POST", path, manifest, query={"fieldManager": names.FIELD_MANAGER})
        if created is None:
            raise RequestRefused(404, f"{path} does not exist")
        return created

    async def replace_object(self, path: str, manifest: Manifest) -> Manifest:
        """Replace an object that still has the manifest's resourceVersion. Raises StaleObservation when it has not."""
        replaced = await self._request("PUT", path, manifest, query={"fieldManager": names.FIELD_MANAGER})
        if replaced is None:
            raise StaleObservation(f"{path} is gone")
        return replaced

    async def apply_object(self, path: str, manifest: Manifest, *, force: bool) -> Manifest:
        """Server-side apply as the operator's field manager.

        force: take over fields that others own. Raises StaleObservation without it when others own them; and when the
        object has another uid than the manifest's, or nothing can be there (any more).
        """
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict", "force": str(force).lower()}
        applied = await self._request("PATCH", path, manifest, query=query, content_type=_APPLY)
        if applied is None:
            raise StaleObservation(f"{path} is gone")
        return applied

    async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
        """JSON-merge-patch one object; None when it does not exist.

        A `metadata.resourceVersion` in the patch makes it conditional: raises StaleObservation when it is another one.
        """
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._request("PATCH", path, patch, query=query, content_type=_MERGE)

    async def delete_object(self, path: str, uid: str) -> None:
        """Delete the object that has this uid; gone already is fine. Raises StaleObservation when it is another one."""
        await self._request("DELETE", path, {"preconditions": {"uid": uid}, "propagationPolicy": "Background"})

    async def _request(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
    ) -> Manifest | None:
        """One request. None for 404."""
        status, text = await self._call(method, path, body, query or {}, content_type)
        if status == 404:
            return None
        if status >= 400:
            raise _error(status, text, f"{method} {path}", decides=content_type == _APPLY or method == "DELETE")
        answer: Manifest = json.loads(text)
        return answer

    async def _call(
        self, method: str, path: str, body: Manifest | None, query: Mapping[str, str], content_type: str
    ) -> tuple[int, bytes]:
        """Status and text of the answer, whatever they are."""
        try:
            serialized = await self._api.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params={"Accept": _JSON, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(*serialized, _request_timeout=_TIMEOUT)
            return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise ClusterUnavailable(f"{method} {path}: {type(error).__name__} {error}") from error


class NamespacedSource:
    """Lists that name no namespace, from one that may read some namespaces only. With no namespaces: from all."""

    def __init__(self, client: KubeClient, namespaces: tuple[str, ...]) -> None:
        self._client = client
        self._namespaces = namespaces

    async def list_objects(self, path: str, label_selector: str | None = None) -> list[Manifest]:
        """List a collection of all these namespaces, as `KubeClient.list_objects` does."""
        if not self._namespaces:
            return await self._client.list_objects(path, label_selector)
        group, _, plural = path.rpartition("/")
        paths = [f"{group}/namespaces/{namespace}/{plural}" for namespace in self._namespaces]
        lists = await asyncio.gather(*(self._client.list_objects(path, label_selector) for path in paths))
        return [item for items in lists for item in items]

    async def read_object(self, path: str) -> Manifest | None:
        """Read one object, as `KubeClient.read_object` does."""
        return await self._client.read_object(path)

    async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
        """Patch one object, as `KubeClient.patch_object` does."""
        return await self._client.patch_object(path, patch)


def _with_types(answer: Manifest) -> list[Manifest]:
    """The items of a list, each with the apiVersion and kind that lists leave out."""
    types = {"apiVersion": answer["apiVersion"], "kind": answer["kind"].removesuffix("List")}
    return [{**types, **item} for item in answer.get("items") or ()]


def _error(status: int, text: bytes, request: str, *, decides: bool) -> Exception:
    answer = _status_object(text)
    message = str(answer.get("message") or text.decode(errors="replace")[:_LONGEST_TEXT])
    if status == 409 or any(words in message for words in _STALE_WORDS):
        return StaleObservation(f"{request}: {message}")
    # Server-side apply answers with 500 where a field is unknown or of the wrong type, and both where a webhook fails.
    refused = decides and status == 500 and bool(answer) and not _is_momentary(answer)
    if status == 429 or (status >= 500 and not refused):
        return ClusterUnavailable(f"{request}: {status} {message}")
    return RequestRefused(status, message)


def _status_object(text: bytes) -> Manifest:
    """The API server's own answer to a request that failed; empty where something before it has answered."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) and answer.get("kind") == "Status" else {}


def _is_momentary(answer: Manifest) -> bool:
    return answer.get("reason") == _STORE_REASON or _STORE_WORDS in str(answer.get("message"))
