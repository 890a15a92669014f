"""Who may ask the adapter: the API server as front proxy, and nobody else. Called by `server`; `api` asks it.

Every cluster publishes in kube-system/extension-apiserver-authentication which authority signs the certificate that its
API server shows to aggregated APIs, and under which names.
Source: Kubernetes documentation, "Configure the Aggregation Layer".
"""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from typing import Any, Final

from paceline_operator.adapter.certificates import ServingCertificate
from paceline_operator.adapter.errors import SetupError
from paceline_operator.adapter.source import ObjectSource

CONFIG_MAP_PATH: Final = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
AUTHORITY_KEY: Final = "requestheader-client-ca-file"
NAMES_KEY: Final = "requestheader-allowed-names"


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """The authority (PEM) of the front proxy's certificate, and the common names it may have; none means any."""

    authority: str
    allowed_names: frozenset[str]

    def admits(self, peer_certificate: dict[str, Any] | None) -> bool:
        """Whether a peer is the API server. The TLS layer has verified the certificate against `authority`."""
        if not peer_certificate:
            return False
        subject = peer_certificate.get("subject", ())
        common_names = {value for part in subject for field, value in part if field == "commonName"}
        return not self.allowed_names or bool(common_names & self.allowed_names)


async def read_front_proxy(source: ObjectSource) -> FrontProxy:
    """Read what the cluster says of its front proxy.

    Raises:
        SetupError: when the API server runs without the aggregation layer.
        ClusterUnavailable: when it does not answer.
    """
    config_map = await source.read_object(CONFIG_MAP_PATH)
    data = (config_map or {}).get("data", {})
    if not data.get(AUTHORITY_KEY):
        raise SetupError(
            f"{CONFIG_MAP_PATH} has no {AUTHORITY_KEY}: this API server runs without the aggregation layer; "
            "start it with --requestheader-client-ca-file and --proxy-client-cert-file"
        )
    return FrontProxy(data[AUTHORITY_KEY], frozenset(json.loads(data.get(NAMES_KEY) or "[]")))


class TlsFront:
    """The TLS side of the listening socket, whose certificate and trust can change while it listens.

    The socket keeps one context; every handshake is handed to a context made of the values of that moment.
    """

    def __init__(self, front_proxy: FrontProxy, certificate: ServingCertificate) -> None:
        self._front_proxy = front_proxy
        self._certificate = certificate
        self._current = _make_context(front_proxy, certificate)
        self.context = _make_context(front_proxy, certificate)
        self.context.sni_callback = self._choose

    def admits(self, peer_certificate: dict[str, Any] | None) -> bool:
        """Whether requests of this peer are answered."""
        return self._front_proxy.admits(peer_certificate)

    def update(self, front_proxy: FrontProxy, certificate: ServingCertificate) -> bool:
        """Use these from the next handshake on. Returns whether anything changed."""
        if (front_proxy, certificate) == (self._front_proxy, self._certificate):
            return False
        self._current = _make_context(front_proxy, certificate)
        self._front_proxy, self._certificate = front_proxy, certificate
        return True

    def _choose(self, connection: ssl.SSLObject, _server_name: str, _context: ssl.SSLContext) -> None:
        connection.context = self._current


def _make_context(front_proxy: FrontProxy, certificate: ServingCertificate) -> ssl.SSLContext:
    """Ask for a client certificate but do not insist: the kubelet's probes have none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the authority may be an intermediate one, as Go takes it
    context.options |= ssl.OP_NO_TICKET  # a resumed session would skip the check against a changed authority
    context.load_verify_locations(cadata=front_proxy.authority)
    certificate.load_into(context)
    return context
