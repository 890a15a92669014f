"""Keys and certificates of one throw-away cluster, made when it starts and gone with it.

Used by `api_server` and `node`. Elliptic keys, because making them takes no time.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=2)  # longer than any test run; a forgotten key is worth nothing


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that signs what one cluster needs."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, name: str) -> Authority:
        """Return a new self-signed authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(x509.Name([_common(name)]), x509.Name([_common(name)]), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    def issue(self, path: Path, name: str, *, group: str | None = None, hosts: Sequence[str] = ()) -> None:
        """Write `path`.crt and `path`.key for a server on `hosts`, or for a client `name` in `group`.

        `hosts` takes DNS names and IP addresses.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(x509.Name([*subject, _common(name)]), self.certificate.subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        path.with_suffix(".crt").write_bytes(_pem(builder.sign(self.key, hashes.SHA256())))
        write_key(path.with_suffix(".key"), key)

    def write(self, path: Path) -> None:
        """Write the authority's certificate (never its key)."""
        path.write_bytes(_pem(self.certificate))


def write_key_pair(path: Path) -> None:
    """Write `path`.key and `path`.pub: the key that signs service account tokens, and the one that checks them."""
    key = ec.generate_private_key(ec.SECP256R1())
    write_key(path.with_suffix(".key"), key)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key in the form that Go programs read, for the owner's eyes only."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
    )


def _common(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
