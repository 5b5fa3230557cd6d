"""The keys of a federation: which clients may join, and how they recognize the server.

- `ca.crt`, `ca.key`: the authority. Its key stays with whoever issues keys.
- `server/`: for the server's machine, with `clients/NAME.pub` for each admitted client.
- `clients/NAME/`: for that client's machine.

The authority certifies the server only. A client is admitted because the server has its public
key; removing `server/clients/NAME.pub` excludes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from perfed.core.errors import ConfigError
from perfed.data.files import canonical_names, quote
from perfed.federation.transport.certificates import (
    AUTHORITY_DAYS,
    PrivateKey,
    check_dates,
    check_private,
    general_name,
    host_names,
    is_expired,
    issue_authority,
    issue_server,
    new_key,
    private_pem,
    read_authority,
    read_certificate,
    read_client_key,
    read_private_key,
    read_public_key,
    write_file,
)

AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
SERVER, SERVER_CERTIFICATE, SERVER_KEY = "server", "server.crt", "server.key"
CLIENTS, CLIENT_KEY, CLIENT_PUBLIC = "clients", "client.key", "client.pub"

# The server connects to itself by these.
_LOOPBACK: Final = ("127.0.0.1", "localhost")


def make_keys(
    folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int = 825
) -> list[Path]:
    """Create the keys of a federation, or add to them; existing files are kept.

    A client whose public key the server has gets no new key, wherever its private key is. The
    server's certificate is issued again only if it lacks a host or has expired.

    Args:
        folder: where they are written.
        hosts: names and IP addresses by which clients reach the server, besides loopback.
        clients: the clients to admit.
        days: how long a certificate issued now is valid.

    Returns:
        The files written.
    """
    for name in clients:
        _check_name(name)
    twice = next((name for i, name in enumerate(clients) if name in clients[:i]), None)
    if twice is not None:
        raise ConfigError(f"client {quote(twice)}: it is named twice; name each client once")
    if not 1 <= days <= AUTHORITY_DAYS:
        raise ConfigError(f"{days} days: a certificate can be valid for 1 to {AUTHORITY_DAYS} days")
    names = {general_name(host) for host in (*_LOOPBACK, *hosts)}
    # All files before the first is written: so every error comes before it.
    files: dict[Path, bytes] = {}
    try:
        authority = _Authority.of(folder, files)
        _add_server(folder / SERVER, authority, names, days, files)
        for name in clients:
            _add_client(folder, name, authority, files)
        for path, contents in files.items():
            write_file(path, contents)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write keys there: {error}") from None
    return list(files)


@final
@dataclass(frozen=True)
class ServerKeys:
    """The keys of the server's machine, read from its folder and checked.

    Attributes:
        certificate: the server's certificate.
        key: its private key.
        authority: the certificate of the authority that issued it.
        clients: the public key of each admitted client, as Flower registers it; in the order that
            the clients of a `folder` of data have.
    """

    certificate: Path
    key: Path
    authority: Path
    clients: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The keys in a folder like the `server` that `make_keys` creates."""
        _check_folder(folder, SERVER_CERTIFICATE, SERVER)
        certificate, key, authority = (
            folder / name for name in (SERVER_CERTIFICATE, SERVER_KEY, AUTHORITY)
        )
        issued, issuer = read_certificate(certificate), read_authority(authority)
        renew = "or remove the certificate and run `perfed keys` again"
        if issued.public_key() != read_private_key(key).public_key():
            raise ConfigError(
                f"{certificate} does not belong to the key {key}; restore the matching file, "
                f"{renew}"
            )
        try:
            issued.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            raise ConfigError(
                f"{certificate} was not issued by the authority {authority}; restore the matching "
                f"file, {renew}"
            ) from None
        check_private(key)
        check_dates(certificate, issued, "run `perfed keys` again to renew it")
        return cls(certificate, key, authority, _read_admitted(folder / CLIENTS))


@final
@dataclass(frozen=True)
class ClientKeys:
    """The keys of a client's machine, read from its folder and checked.

    Attributes:
        key: the client's private key.
        authority: the certificate by which it recognizes the server.
    """

    key: Path
    authority: Path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The keys in a folder like the `clients/NAME` that `make_keys` creates."""
        _check_folder(folder, CLIENT_KEY, f"{CLIENTS}/NAME")
        key, public, authority = (folder / name for name in (CLIENT_KEY, CLIENT_PUBLIC, AUTHORITY))
        own = read_client_key(key).public_key()
        check_private(key)
        if public.exists() and read_public_key(public) != own:
            raise ConfigError(
                f"{public} does not belong to the key {key}; restore the matching file"
            )
        read_authority(authority)
        return cls(key, authority)


@final
@dataclass(frozen=True)
class _Authority:
    """The authority: its certificate, as in the file, and where its key is or will be."""

    certificate: x509.Certificate
    contents: bytes
    path: Path
    key: PrivateKey | None

    @classmethod
    def of(cls, folder: Path, files: dict[Path, bytes]) -> Self:
        """The authority of a folder; where there is none, a new one, added to the files."""
        certificate, path = folder / AUTHORITY, folder / AUTHORITY_KEY
        if certificate.exists():
            return cls(read_authority(certificate), certificate.read_bytes(), path, None)
        copy = folder / SERVER / AUTHORITY
        if copy.exists():  # existing clients would not trust a new authority
            raise ConfigError(
                f"{certificate}: it is missing; restore it ({copy} is a copy), or create all keys "
                "again in another folder"
            )
        key = read_private_key(path) if path.exists() else new_key()
        issued = issue_authority(key)
        contents = issued.public_bytes(Encoding.PEM)
        if not path.exists():
            files[path] = private_pem(key)
        files[certificate] = contents
        return cls(issued, contents, path, key)

    def issue(
        self, public: CertificatePublicKeyTypes, names: Sequence[x509.GeneralName], days: int
    ) -> bytes:
        """A certificate for a server with these names."""
        if self.key is None and not self.path.exists():
            raise ConfigError(
                f"{self.path}: it is missing, but needed to issue the server's certificate; "
                "restore it"
            )
        key = read_private_key(self.path) if self.key is None else self.key
        if key.public_key() != self.certificate.public_key():
            raise ConfigError(
                f"{self.path} does not belong to {AUTHORITY} in this folder; restore the matching "
                "file"
            )
        return issue_server(self.certificate, key, public, names, days)


def _add_server(
    folder: Path,
    authority: _Authority,
    names: set[x509.GeneralName],
    days: int,
    files: dict[Path, bytes],
) -> None:
    """Add what the server's folder lacks."""
    _add_copy(folder / AUTHORITY, authority, files)
    path, key = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
    current = read_certificate(path) if path.exists() else None
    public: CertificatePublicKeyTypes
    if key.exists():
        public = read_private_key(key).public_key()
    elif current is not None:  # the key was moved to the server's machine
        public = current.public_key()
    else:
        new = new_key()
        public, files[key] = new.public_key(), private_pem(new)
    known = set() if current is None else host_names(current)
    if current is None or names - known or is_expired(current):
        hosts = sorted(names | known, key=lambda name: str(name.value))
        files[path] = authority.issue(public, hosts, days)


def _add_client(folder: Path, name: str, authority: _Authority, files: dict[Path, bytes]) -> None:
    """Add what a client's folder lacks, and its public key for the server."""
    own, admitted = folder / CLIENTS / name, folder / SERVER / CLIENTS / f"{name}.pub"
    key, public = own / CLIENT_KEY, own / CLIENT_PUBLIC
    known = read_public_key(admitted) if admitted.exists() else None
    if not key.exists() and known is not None:
        return  # the folder was moved to the client's machine
    if key.exists():
        private = read_client_key(key)
    else:
        private = new_key()
        files[key] = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    line = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    for path in (public, admitted):
        if not path.exists():
            files[path] = line
        elif read_public_key(path) != private.public_key():
            raise ConfigError(f"{path} does not belong to the key {key}; remove the wrong one")
    _add_copy(own / AUTHORITY, authority, files)


def _add_copy(path: Path, authority: _Authority, files: dict[Path, bytes]) -> None:
    """Add a copy of the authority's certificate where there is none."""
    if not path.exists():
        files[path] = authority.contents
    elif path.read_bytes() != authority.contents:
        raise ConfigError(
            f"{path} is not a copy of {authority.path.with_name(AUTHORITY)}; restore the wrong "
            "one, or create all keys again in another folder"
        )


def _read_admitted(folder: Path) -> dict[str, bytes]:
    """The public keys in a folder, in the order of the clients' names."""
    keys: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        if path.name.startswith("."):  # files of a file manager
            continue
        name = path.name.removesuffix(".pub")
        _check_name(name)
        public = read_public_key(path)
        keys[name] = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        other = owners.setdefault(keys[name], name)
        if other != name:
            raise ConfigError(
                f"{folder}: clients {quote(other)} and {quote(name)} have the same key; remove "
                "one of them, and create another key with `perfed keys`"
            )
    if not keys:
        raise ConfigError(f"{folder}: there are no clients; create their keys with `perfed keys`")
    return {name: keys[name] for name in canonical_names(set(keys))}


def _check_name(name: str) -> None:
    """Raise unless a client can have this name, which becomes a folder's."""
    good = name.strip() and all(c.isalnum() or c in "-_. " for c in name) and name[0] != "."
    if not good or len(name) > 100:
        raise ConfigError(
            f"client {quote(name)}: a name can have letters, digits, spaces, -, _ and . (not "
            "first), at most 100 of them"
        )


def _check_folder(folder: Path, first: str, like: str) -> None:
    """Raise unless it is the right folder."""
    if not (folder / first).is_file():
        raise ConfigError(
            f"{folder}: there is no {first} in it; give a folder like `{like}`, created with "
            "`perfed keys`"
        )
