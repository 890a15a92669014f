"""The adapter's serving certificate: made here, kept in a Secret that replicas share, trusted through the APIService.

Called by `server` at start and every minute. There is no lasting authority whose key could leak: each certificate comes
from an authority of its own that is forgotten at once, and the bundle that the API server gets holds the authorities of
the present and the previous certificate, so that a replica which still serves the previous one stays trusted.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline_operator.adapter.errors import SetupError
from paceline_operator.adapter.source import ObjectSource
from paceline_operator.cluster import Manifest
from paceline_operator.errors import StaleObservation

LIFETIME: Final = timedelta(days=365)
RENEW_BEFORE: Final = timedelta(days=60)
CLOCK_SKEW: Final = timedelta(hours=1)
BUNDLE_KEY, CERTIFICATE_KEY, PRIVATE_KEY_KEY = "ca.crt", "tls.crt", "tls.key"
"""Keys of the Secret, as in Secrets of type kubernetes.io/tls."""


@dataclass(frozen=True, slots=True)
class ServingCertificate:
    """A certificate chain of one, its private key, and the authorities to trust, newest first. All PEM."""

    bundle: bytes
    certificate: bytes
    private_key: bytes

    def load_into(self, context: ssl.SSLContext) -> None:
        """Serve new connections with it."""
        with tempfile.TemporaryDirectory() as folder:  # the ssl module reads certificates from files only
            certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            certificate.write_bytes(self.certificate)
            key.touch(mode=0o600)
            key.write_bytes(self.private_key)
            context.load_cert_chain(certificate, key)


def make_certificate(host: str, now: datetime, previous_bundle: bytes = b"") -> ServingCertificate:
    """Make a new authority and a certificate of it for the DNS name `host`."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(f"paceline-adapter-ca-{x509.random_serial_number():x}"[:64])
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    issuer_key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _builder(_name("paceline-adapter"), authority_name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(issuer_key_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    private_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    bundle = authority.public_bytes(serialization.Encoding.PEM) + _first_certificate(previous_bundle)
    return ServingCertificate(bundle, certificate.public_bytes(serialization.Encoding.PEM), private_key)


def needs_renewal(certificate: ServingCertificate, host: str, now: datetime) -> bool:
    """Whether it is for another host, ends soon, or cannot be read at all."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate.certificate)
        key = serialization.load_pem_private_key(certificate.private_key, password=None)
        hosts = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        x509.load_pem_x509_certificates(certificate.bundle)[0].public_key()
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return True
    fits = host in hosts.get_values_for_type(x509.DNSName) and key.public_key() == leaf.public_key()
    return not fits or leaf.not_valid_after_utc - now < RENEW_BEFORE


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _first_certificate(bundle: bytes) -> bytes:
    try:
        return x509.load_pem_x509_certificates(bundle)[0].public_bytes(serialization.Encoding.PEM)
    except ValueError:
        return b""


@dataclass(frozen=True, slots=True)
class CertificateStore:
    """The Secret that holds the certificate and the APIService that trusts it. The chart makes both; we fill them in.

    host: DNS name by which the API server calls us, SERVICE.NAMESPACE.svc.
    """

    source: ObjectSource
    secret_path: str
    api_service_path: str
    host: str

    async def current(self) -> ServingCertificate:
        """Return the shared certificate, made new where there is none that lasts, and have the API server trust it.

        Replicas that start together agree: the first to write wins, the others read again.

        Raises:
            SetupError: when Secret or APIService do not exist.
            StaleObservation: when another replica wrote at the same moment, twice.
            ClusterUnavailable: when the API server does not answer.
        """
        try:
            certificate = await self._read_or_renew()
        except StaleObservation:
            certificate = await self._read_or_renew()
        await self._trust(certificate.bundle)
        return certificate

    async def _read_or_renew(self) -> ServingCertificate:
        secret = await self.source.read_object(self.secret_path)
        if secret is None:
            raise SetupError(f"{self.secret_path} does not exist: the chart creates it, install it whole")
        stored, now = _from_secret(secret), datetime.now(UTC)
        if not needs_renewal(stored, self.host, now):
            return stored
        renewed = make_certificate(self.host, now, previous_bundle=stored.bundle)
        version = {"resourceVersion": secret["metadata"]["resourceVersion"]}
        if await self.source.patch_object(self.secret_path, {"metadata": version, "data": _to_data(renewed)}) is None:
            raise StaleObservation(f"{self.secret_path} was deleted")
        return renewed

    async def _trust(self, bundle: bytes) -> None:
        wanted = base64.b64encode(bundle).decode()
        api_service = await self.source.read_object(self.api_service_path)
        if api_service is not None and api_service["spec"].get("caBundle") != wanted:
            api_service = await self.source.patch_object(self.api_service_path, {"spec": {"caBundle": wanted}})
        if api_service is None:
            raise SetupError(f"{self.api_service_path} does not exist: set adapter.apiService.enabled in the chart")


def _from_secret(secret: Manifest) -> ServingCertificate:
    data = secret.get("data") or {}
    bundle, certificate, key = (
        base64.b64decode(data.get(key, "")) for key in (BUNDLE_KEY, CERTIFICATE_KEY, PRIVATE_KEY_KEY)
    )
    return ServingCertificate(bundle, certificate, key)


def _to_data(certificate: ServingCertificate) -> dict[str, str]:
    parts = {
        BUNDLE_KEY: certificate.bundle,
        CERTIFICATE_KEY: certificate.certificate,
        PRIVATE_KEY_KEY: certificate.private_key,
    }
    return {key: base64.b64encode(value).decode() for key, value in parts.items()}
