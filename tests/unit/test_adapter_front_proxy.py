"""Whom the adapter takes for the API server, by real handshakes in memory."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline_operator.adapter.certificates import make_certificate
from paceline_operator.adapter.front_proxy import FrontProxy, TlsFront
from paceline_operator.adapter.testing import shake_hands

NOW = datetime.now(UTC)
SERVING = make_certificate("adapter.ops.svc", NOW)


class Party:
    """Somebody with a certificate: an authority, or the front proxy itself."""

    def __init__(self, name: str, issuer: Party | None = None, *, is_authority: bool = True) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = issuer or self
        self.certificate = (
            x509.CertificateBuilder(signer.name, self.name, self.key.public_key(), x509.random_serial_number())
            .not_valid_before(NOW - timedelta(hours=1))
            .not_valid_after(NOW + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(signer.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The certificate as it is written into files."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def peer_of(front: TlsFront, client: Party, folder: Path) -> dict[str, object] | None:
    """Shake hands as this client, which shows its own certificate and no chain: what the adapter then knows of it."""
    file = folder / "client.pem"
    key = client.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(client.pem + key)
    trust = ssl.create_default_context(cadata=SERVING.bundle.decode())
    trust.load_cert_chain(file)
    return shake_hands(front.context, trust, "adapter.ops.svc").getpeercert()


@pytest.fixture
def root() -> Party:
    """An authority that signs itself."""
    return Party("root")


@pytest.mark.parametrize("through_intermediate", [False, True])
def test_the_api_server_is_admitted_whether_or_not_its_authority_signs_itself(
    root: Party, tmp_path: Path, *, through_intermediate: bool
) -> None:
    """Where the authority of the aggregation layer is an intermediate one, the cluster publishes that one alone."""
    authority = Party("intermediate", root) if through_intermediate else root
    front = TlsFront(FrontProxy(authority.pem.decode(), frozenset({"front-proxy"})), SERVING)
    peer = peer_of(front, Party("front-proxy", authority, is_authority=False), tmp_path)
    assert front.admits(peer)


def test_a_certificate_of_the_intermediates_own_authority_is_not_enough(root: Party, tmp_path: Path) -> None:
    """Trust begins at the authority that the cluster names, not above it."""
    front = TlsFront(FrontProxy(Party("intermediate", root).pem.decode(), frozenset({"front-proxy"})), SERVING)
    with pytest.raises(ssl.SSLError):
        peer_of(front, Party("front-proxy", root, is_authority=False), tmp_path)
