"""The keys of a federation: who may join it, and how clients know its server.

- `ca.crt`, `ca.key`: the authority. The key stays with whoever issues keys.
- `server/`: what the server's machine gets, with `clients/NAME.pub` for each client it admits.
- `clients/NAME/`: what that client's machine gets.

The authority vouches for the server alone. A client is admitted because the server has its public
key; removing `server/clients/NAME.pub` shuts it out.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self, TypeVar, final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from perfed.core.errors import ConfigError
from perfed.data.files import canonical_names, quote

AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
SERVER, SERVER_CERTIFICATE, SERVER_KEY = "server", "server.crt", "server.key"
CLIENTS, CLIENT_KEY, CLIENT_PUBLIC = "clients", "client.key", "client.pub"

# The server asks itself, too, by these.
_LOOPBACK: Final = ("127.0.0.1", "localhost")
# Every client has the authority's certificate, so it is to last; the server's is issued anew.
_AUTHORITY_DAYS: Final = 3650
# Clocks differ between machines.
_EARLIER: Final = timedelta(days=1)
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"({_LABEL}\.)*{_LABEL}")
_MAKES: Final = "`perfed keys` makes it"


def make_keys(
    folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int = 825
) -> list[Path]:
    """Make the keys of a federation, or add to them; what is there already is kept.

    A client whose public key the server has is not given another, wherever its private key is. The
    server's certificate is issued anew only if it lacks a host asked for, or has expired.

    Args:
        folder: where they are put.
        hosts: names and IP addresses by which clients reach the server, beside loopback.
        clients: the clients to admit.
        days: how long a certificate that is issued now lasts.

    Returns:
        The files written.
    """
    for name in clients:
        _check_name(name)
    twice = next((name for i, name in enumerate(clients) if name in clients[:i]), None)
    if twice is not None:
        raise ConfigError(f"client {quote(twice)}: it is named twice; name each client once")
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise ConfigError(f"{days} days: a certificate lasts from 1 to {_AUTHORITY_DAYS} days")
    wanted = {_general_name(host) for host in (*_LOOPBACK, *hosts)}
    # All there is to write, before anything is: whatever is at fault is found first.
    files: dict[Path, bytes] = {}
    try:
        issuer = _Issuer.of(folder, files)
        _add_server(folder / SERVER, issuer, wanted, days, files)
        for name in clients:
            _add_client(folder, name, issuer, files)
        for path, contents in files.items():
            _write(path, contents)
    except OSError as error:
        raise ConfigError(f"{folder}: keys cannot be put there: {error}") from None
    return list(files)


@final
@dataclass(frozen=True)
class ServerKeys:
    """What the server's machine needs, read from its folder and checked.

    Attributes:
        certificate: the server's certificate.
        key: its private key.
        authority: the certificate of the authority that issued it.
        clients: the public key of each client admitted, as Flower registers it; in the order that
            the clients of a `folder` of data have.
    """

    certificate: Path
    key: Path
    authority: Path
    clients: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The keys in a folder like the `server` that `make_keys` makes."""
        _check_folder(folder, SERVER_CERTIFICATE, SERVER)
        certificate, key, authority = (
            folder / name for name in (SERVER_CERTIFICATE, SERVER_KEY, AUTHORITY)
        )
        issued, issuer = _certificate(certificate), _authority(authority)
        if issued.public_key() != _private_key(key).public_key():
            raise ConfigError(
                f"{certificate} is not of the key {key}; put back those that were made together, "
                "or remove the certificate and let `perfed keys` issue another"
            )
        try:
            issued.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            raise ConfigError(
                f"{certificate} is not issued by the authority {authority}; put back those that "
                "were made together, or remove the certificate and let `perfed keys` issue another"
            ) from None
        _check_private(key)
        _check_dates(certificate, issued, "let `perfed keys` issue another")
        return cls(certificate, key, authority, _admitted(folder / CLIENTS))


@final
@dataclass(frozen=True)
class ClientKeys:
    """What a client's machine needs, read from its folder and checked.

    Attributes:
        key: the client's private key.
        authority: the certificate by which it knows the server.
    """

    key: Path
    authority: Path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The keys in a folder like the `clients/NAME` that `make_keys` makes."""
        _check_folder(folder, CLIENT_KEY, f"{CLIENTS}/NAME")
        key, public, authority = (folder / name for name in (CLIENT_KEY, CLIENT_PUBLIC, AUTHORITY))
        own = _client_key(key).public_key()
        _check_private(key)
        if public.exists() and _public_key(public) != own:
            raise ConfigError(
                f"{public} is not of the key {key}; put back those that were made together"
            )
        _authority(authority)
        return cls(key, authority)


@final
@dataclass(frozen=True)
class _Issuer:
    """The authority: its certificate as it is in the file, and where its key is or will be."""

    certificate: x509.Certificate
    contents: bytes
    path: Path
    made: ec.EllipticCurvePrivateKey | None

    @classmethod
    def of(cls, folder: Path, files: dict[Path, bytes]) -> Self:
        """The authority of a folder; where there is none, a new one, added to the files."""
        certificate, path = folder / AUTHORITY, folder / AUTHORITY_KEY
        if certificate.exists():
            return cls(_authority(certificate), certificate.read_bytes(), path, None)
        copy = folder / SERVER / AUTHORITY
        if copy.exists():  # a new authority would be unknown to the clients there are
            raise ConfigError(
                f"{certificate}: it is missing; put back that of which {copy} is a copy, or make "
                "all keys anew in another folder"
            )
        made = _private_key(path) if path.exists() else ec.generate_private_key(ec.SECP384R1())
        issued = _self_issued(made)
        contents = issued.public_bytes(Encoding.PEM)
        if not path.exists():
            files[path] = _pem(made)
        files[certificate] = contents
        return cls(issued, contents, path, made)

    def issue(
        self, public: CertificatePublicKeyTypes, names: Sequence[x509.GeneralName], days: int
    ) -> bytes:
        """A certificate for a server by these names."""
        if self.made is None and not self.path.exists():
            raise ConfigError(
                f"{self.path}: it is missing, and the server cannot be issued a certificate "
                "without it; put it back"
            )
        key = _private_key(self.path) if self.made is None else self.made
        if key.public_key() != self.certificate.public_key():
            raise ConfigError(
                f"{self.path} is not the key of {AUTHORITY} there; put back those that were made "
                "together"
            )
        now = datetime.now(UTC)
        last = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perfed server")])
        builder = _builder(subject, self.certificate.subject, public, key.public_key(), now, last)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        server_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(server_only, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


def _add_server(
    folder: Path,
    issuer: _Issuer,
    wanted: set[x509.GeneralName],
    days: int,
    files: dict[Path, bytes],
) -> None:
    """Add what the server's folder lacks."""
    _add_copy(folder / AUTHORITY, issuer, files)
    path, key = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
    there = _certificate(path) if path.exists() else None
    public: CertificatePublicKeyTypes
    if key.exists():
        public = _private_key(key).public_key()
    elif there is not None:  # its key has gone to the server's machine
        public = there.public_key()
    else:
        made = ec.generate_private_key(ec.SECP384R1())
        public, files[key] = made.public_key(), _pem(made)
    known = set() if there is None else _names_in(there)
    if there is None or wanted - known or there.not_valid_after_utc < datetime.now(UTC):
        names = sorted(wanted | known, key=lambda name: str(name.value))
        files[path] = issuer.issue(public, names, days)


def _add_client(folder: Path, name: str, issuer: _Issuer, files: dict[Path, bytes]) -> None:
    """Add what a client's folder lacks, and its public key for the server."""
    own, admitted = folder / CLIENTS / name, folder / SERVER / CLIENTS / f"{name}.pub"
    key, public = own / CLIENT_KEY, own / CLIENT_PUBLIC
    known = _public_key(admitted) if admitted.exists() else None
    if not key.exists() and known is not None:
        return  # its folder has gone to its machine
    if key.exists():
        made = _client_key(key)
    else:
        made = ec.generate_private_key(ec.SECP384R1())
        files[key] = made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    said = made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    for path in (public, admitted):
        if not path.exists():
            files[path] = said
        elif _public_key(path) != made.public_key():
            raise ConfigError(f"{path} is not of the key {key}; remove the one that is wrong")
    _add_copy(own / AUTHORITY, issuer, files)


def _add_copy(path: Path, issuer: _Issuer, files: dict[Path, bytes]) -> None:
    """Add a copy of the authority's certificate where there is none."""
    if not path.exists():
        files[path] = issuer.contents
    elif path.read_bytes() != issuer.contents:
        raise ConfigError(
            f"{path} is not a copy of {issuer.path.with_name(AUTHORITY)}; put back the one that is "
            "wrong, or make all keys anew in another folder"
        )


def _admitted(folder: Path) -> dict[str, bytes]:
    """The public keys in a folder, in the order of the clients' names."""
    found: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        if path.name.startswith("."):  # what file managers leave behind
            continue
        name = path.name.removesuffix(".pub")
        _check_name(name)
        public = _public_key(path)
        found[name] = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        other = owners.setdefault(found[name], name)
        if other != name:
            raise ConfigError(
                f"{folder}: clients {quote(other)} and {quote(name)} have the same key; remove "
                "one, or let `perfed keys` make it another"
            )
    if not found:
        raise ConfigError(f"{folder}: there is no client; `perfed keys` makes their keys")
    return {name: found[name] for name in canonical_names(set(found))}


def _check_name(name: str) -> None:
    """Raise unless a client can be called so: its name is that of a folder."""
    good = name.strip() and all(c.isalnum() or c in "-_. " for c in name) and name[0] != "."
    if not good or len(name) > 100:
        raise ConfigError(
            f"client {quote(name)}: a name is of letters, digits, spaces, -, _ and . (not first), "
            "at most 100 of them"
        )


def _general_name(host: str) -> x509.GeneralName:
    """A host as certificates have it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # What ends in digits is an address that is wrong.
        digits = host.rpartition(".")[2].isdigit()
        if digits or len(host) > 253 or _HOST.fullmatch(host) is None:
            raise ConfigError(
                f"host {quote(host)}: give a name or an IP address, without a port or brackets"
            ) from None
        return x509.DNSName(host.lower())
    if address.is_unspecified or "%" in host:
        raise ConfigError(
            f"host {quote(host)}: nobody can be reached there; give the address clients use"
        )
    return x509.IPAddress(address)


def _names_in(certificate: x509.Certificate) -> set[x509.GeneralName]:
    """The hosts that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(found.value)


def _self_issued(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """The certificate of an authority that issues servers theirs, and no further authority."""
    now, public = datetime.now(UTC), key.public_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perfed authority")])
    last = now + timedelta(days=_AUTHORITY_DAYS)
    builder = _builder(name, name, public, public, now, last)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(key, hashes.SHA384())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: CertificatePublicKeyTypes,
    issuer_public: ec.EllipticCurvePublicKey,
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
        .not_valid_before(now - _EARLIER)
        .not_valid_after(last)
        .add_extension(own, critical=False)
        .add_extension(by, critical=False)
    )


def _usage(
    digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    """What a certificate's key is for."""
    return x509.KeyUsage(
        digital_signature=digital_signature, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=key_cert_sign,
        crl_sign=crl_sign, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _check_folder(folder: Path, first: str, like: str) -> None:
    """Raise unless it is the right folder."""
    if not (folder / first).is_file():
        raise ConfigError(
            f"{folder}: there is no {first} in it; name a folder like `{like}` that `perfed keys` "
            "makes"
        )


def _check_private(path: Path) -> None:
    """Raise if others than its owner can read a key; Windows has no such modes."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others can read this key; shut them out by: chmod 600 {path}")


def _check_dates(path: Path, certificate: x509.Certificate, remedy: str) -> None:
    now = datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise ConfigError(f"{path}: it expired on {last:%Y-%m-%d}; {remedy}")
    if now < first:
        raise ConfigError(f"{path}: it is valid from {first:%Y-%m-%d} on; check the clock")


def _authority(path: Path) -> x509.Certificate:
    """An authority's certificate that can be used today."""
    certificate = _certificate(path)
    try:
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        issues = basic.value.ca
    except x509.ExtensionNotFound:
        issues = False
    if not issues:
        raise ConfigError(f"{path}: it is no authority's certificate; {_MAKES}")
    _check_dates(path, certificate, "make all keys anew in another folder")
    return certificate


def _certificate(path: Path) -> x509.Certificate:
    return _parsed(path, x509.load_pem_x509_certificate, "a certificate")


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    def load(contents: bytes) -> ec.EllipticCurvePrivateKey:
        return _private_ec(load_pem_private_key(contents, None))

    return _parsed(path, load, "a private EC key")


def _client_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A client's private key, in the one format that Flower reads."""

    def load(contents: bytes) -> ec.EllipticCurvePrivateKey:
        return _private_ec(load_ssh_private_key(contents, None))

    return _parsed(path, load, "a private EC key in OpenSSH's format without a password")


def _public_key(path: Path) -> ec.EllipticCurvePublicKey:
    def load(contents: bytes) -> ec.EllipticCurvePublicKey:
        key = load_ssh_public_key(contents)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise TypeError(type(key).__name__)
        return key

    return _parsed(path, load, "a public EC key in OpenSSH's format")


def _private_ec(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(type(key).__name__)
    return key


_T = TypeVar("_T")


def _parsed(path: Path, load: Callable[[bytes], _T], what: str) -> _T:
    """What a file holds."""
    try:
        return load(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; {_MAKES}") from None
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: it is not {what}; {_MAKES}") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, contents: bytes) -> None:
    """Write a file whole; a private key is its owner's alone from the moment it exists."""
    # A parent made on the way holds no keys itself, so the mode is the innermost folder's.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    mode = 0o600 if path.suffix == ".key" else 0o644
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
