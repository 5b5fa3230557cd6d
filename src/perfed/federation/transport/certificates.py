"""Certificates and keys as files: issued, read and checked."""

import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from perfed.core.errors import ConfigError
from perfed.data.files import quote

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

# Every client has the authority's certificate, so it has to last; the server's can be renewed.
AUTHORITY_DAYS: Final = 3650
# Clocks differ between machines.
_CLOCK_SKEW: Final = timedelta(days=1)
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"({_LABEL}\.)*{_LABEL}")
_HINT: Final = "create it with `perfed keys`"


def new_key() -> PrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def issue_authority(key: PrivateKey) -> x509.Certificate:
    """The certificate of an authority that issues certificates of servers only."""
    now, public = datetime.now(UTC), key.public_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perfed authority")])
    last = now + timedelta(days=AUTHORITY_DAYS)
    builder = _builder(name, name, public, public, now, last)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(key, hashes.SHA384())


def issue_server(
    authority: x509.Certificate,
    key: PrivateKey,
    public: CertificatePublicKeyTypes,
    names: Sequence[x509.GeneralName],
    days: int,
) -> bytes:
    """A certificate for a server with these names, as PEM.

    Args:
        authority: the authority's certificate.
        key: its private key.
        public: the server's public key.
        names: the server's hosts.
        days: how long it is valid, at most as long as the authority's.
    """
    now = datetime.now(UTC)
    last = min(now + timedelta(days=days), authority.not_valid_after_utc)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perfed server")])
    builder = _builder(subject, authority.subject, public, key.public_key(), now, last)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    server_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = builder.add_extension(server_only, critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


def general_name(host: str) -> x509.GeneralName:
    """A host as certificates have it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # What ends in digits is meant to be an address.
        digits = host.rpartition(".")[2].isdigit()
        if digits or len(host) > 253 or _HOST.fullmatch(host) is None:
            raise ConfigError(
                f"host {quote(host)}: give a name or an IP address, without a port or brackets"
            ) from None
        return x509.DNSName(host.lower())
    if address.is_unspecified or "%" in host:
        raise ConfigError(
            f"host {quote(host)}: clients cannot connect to it; give the address they use"
        )
    return x509.IPAddress(address)


def host_names(certificate: x509.Certificate) -> set[x509.GeneralName]:
    """The hosts that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(names.value)


def is_expired(certificate: x509.Certificate) -> bool:
    """Whether its last day is over."""
    return certificate.not_valid_after_utc < datetime.now(UTC)


def check_dates(path: Path, certificate: x509.Certificate, remedy: str) -> None:
    """Raise unless a certificate is valid today."""
    if is_expired(certificate):
        last = certificate.not_valid_after_utc
        raise ConfigError(f"{path}: it expired on {last:%Y-%m-%d}; {remedy}")
    if datetime.now(UTC) < (first := certificate.not_valid_before_utc):
        raise ConfigError(f"{path}: it is valid from {first:%Y-%m-%d} on; check the clock")


def check_private(path: Path) -> None:
    """Raise if other users can read a private key; Windows has no such modes."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: other users can read this key; run: chmod 600 {path}")


def read_authority(path: Path) -> x509.Certificate:
    """An authority's certificate, valid today."""
    certificate = read_certificate(path)
    try:
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        issues = basic.value.ca
    except x509.ExtensionNotFound:
        issues = False
    if not issues:
        raise ConfigError(f"{path}: it is not the certificate of an authority; {_HINT}")
    check_dates(path, certificate, "create all keys again in another folder")
    return certificate


def read_certificate(path: Path) -> x509.Certificate:
    """A certificate."""
    return _parse(path, x509.load_pem_x509_certificate, "a certificate")


def read_private_key(path: Path) -> PrivateKey:
    """The private key of the authority or of the server."""

    def load(contents: bytes) -> PrivateKey:
        return _private_ec(load_pem_private_key(contents, None))

    return _parse(path, load, "a private EC key")


def read_client_key(path: Path) -> PrivateKey:
    """A client's private key, in the only format that Flower reads."""

    def load(contents: bytes) -> PrivateKey:
        return _private_ec(load_ssh_private_key(contents, None))

    return _parse(path, load, "a private EC key in OpenSSH's format without a password")


def read_public_key(path: Path) -> PublicKey:
    """A client's public key."""

    def load(contents: bytes) -> PublicKey:
        key = load_ssh_public_key(contents)
        if not isinstance(key, PublicKey):
            raise TypeError(type(key).__name__)
        return key

    return _parse(path, load, "a public EC key in OpenSSH's format")


def private_pem(key: PrivateKey) -> bytes:
    """A private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_file(path: Path, contents: bytes) -> None:
    """Write a file completely; only its owner can read a private key, from the start."""
    # Parents made on the way hold no keys themselves, so only the innermost folder is closed.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    mode = 0o600 if path.suffix == ".key" else 0o644
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: CertificatePublicKeyTypes,
    issuer_public: PublicKey,
    now: datetime,
    last: datetime,
) -> x509.CertificateBuilder:
    """What all certificates have."""
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_public)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(last)
        .add_extension(own, critical=False)
        .add_extension(by, critical=False)
    )


def _usage(
    digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=key_cert_sign,
        crl_sign=crl_sign, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _private_ec(key: object) -> PrivateKey:
    if not isinstance(key, PrivateKey):
        raise TypeError(type(key).__name__)
    return key


_T = TypeVar("_T")


def _parse(path: Path, load: Callable[[bytes], _T], kind: str) -> _T:
    """What a file contains."""
    try:
        return load(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; {_HINT}") from None
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: it is not {kind}; {_HINT}") from None
