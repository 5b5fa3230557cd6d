"""The keys of a federation: what is made, what is kept, who can read it, and what is refused."""

import argparse
import os
import shutil
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

from perfed.core.errors import ConfigError
from perfed.data import files as own
from perfed.federation.transport import certificates
from perfed.federation.transport.keys import ClientKeys, ServerKeys, make_keys


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients' keys, made once; tests that change them take a copy."""
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_keys(folder, ["fl.example.org", "10.1.2.3", "2001:db8::7"], ["Anna", "Ben B."])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "keys"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> set[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(name.value) for name in found.value}


def handshake(server: Path, authority: Path, host: str) -> None:
    """A client of that authority greets the server by that name; in memory, and strictly."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    client_context.load_verify_locations(authority)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server / "server.crt", server / "server.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname=host)
    there = server_context.wrap_bio(up, down, server_side=True)
    for side in (client, there, client, there):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue


def test_everyone_gets_what_they_need_and_nothing_else(made: Path) -> None:
    client = {"ca.crt", "client.key", "client.pub"}
    assert set(contents(made)) == {
        "ca.crt", "ca.key", "server/ca.crt", "server/server.crt", "server/server.key",
        "server/clients/Anna.pub", "server/clients/Ben B..pub",
        *(f"clients/{name}/{file}" for name in ("Anna", "Ben B.") for file in client),
    }  # fmt: skip


def test_what_was_written_is_returned(tmp_path: Path) -> None:
    paths = make_keys(tmp_path / "keys", [], ["a"])
    assert {p.relative_to(tmp_path / "keys").as_posix() for p in paths} == set(
        contents(tmp_path / "keys")
    )
    assert len(paths) == len(set(paths))
    assert make_keys(tmp_path / "keys", [], ["a"]) == []
    assert make_keys(tmp_path / "keys", [], []) == []


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_private_keys_are_their_owners_alone_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is changed later (no chmod), and the umask takes nothing away."""

    def never(*arguments: object, **others: object) -> None:
        raise AssertionError("a mode was set after the file was there")

    for name in ("chmod", "fchmod", "lchmod"):
        monkeypatch.setattr(os, name, never, raising=False)
    monkeypatch.setattr(Path, "chmod", never)
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys", [], ["a"])
    finally:
        os.umask(before)
    private = sorted((tmp_path / "keys").rglob("*.key"))
    assert [p.name for p in private] == ["ca.key", "client.key", "server.key"]
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path.parent


def test_the_server_is_known_by_its_hosts_and_by_loopback(made: Path) -> None:
    for host in ("fl.example.org", "10.1.2.3", "2001:db8::7", "127.0.0.1", "localhost"):
        handshake(made / "server", made / "clients" / "Anna" / "ca.crt", host)
    for host in ("example.org", "10.1.2.4"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(made / "server", made / "ca.crt", host)


def test_addresses_and_names_are_told_apart(made: Path) -> None:
    found = certificate(made / "server" / "server.crt").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert set(found.value.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost"}
    addresses = {str(a) for a in found.value.get_values_for_type(x509.IPAddress)}
    assert addresses == {"10.1.2.3", "2001:db8::7", "127.0.0.1"}


def test_another_authority_is_not_believed(made: Path, tmp_path: Path) -> None:
    make_keys(tmp_path, [], ["a"])
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        handshake(made / "server", tmp_path / "ca.crt", "localhost")


def test_certificates_say_what_they_are_for(made: Path) -> None:
    authority, server = certificate(made / "ca.crt"), certificate(made / "server" / "server.crt")
    for issued, is_authority in ((authority, True), (server, False)):
        basic = issued.extensions.get_extension_for_class(x509.BasicConstraints)
        usage = issued.extensions.get_extension_for_class(x509.KeyUsage)
        assert basic.critical
        assert usage.critical
        assert basic.value.ca is usage.value.key_cert_sign is is_authority
        assert usage.value.digital_signature is not is_authority
    own_days = server.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=824) < own_days <= timedelta(days=825)
    assert authority.not_valid_after_utc > server.not_valid_after_utc


def test_federation_reads_clients_keys(made: Path) -> None:
    """Its own loaders, and the bytes that it registers."""
    admitted = ServerKeys.read(made / "server").clients
    for name, registered in admitted.items():
        key = made / "clients" / name / "client.key"
        arguments = argparse.Namespace(
            auth_supernode_private_key=str(key), auth_supernode_public_key=None
        )
        pair = _try_setup_client_authentication(arguments)
        assert pair is not None
        private, public = pair
        assert private.curve.name == "secp384r1"
        assert public_key_to_bytes(public) == registered
        assert try_load_public_key(made / "server" / "clients" / f"{name}.pub") == registered
        assert try_load_public_key(made / "clients" / name / "client.pub") == registered


def test_what_is_there_is_kept(folder: Path) -> None:
    before = contents(folder)
    paths = make_keys(folder, ["10.1.2.3"], ["Ben B.", "Cleo"])
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert {p.relative_to(folder).as_posix() for p in paths} == set(after) - set(before)
    assert set(ServerKeys.read(folder / "server").clients) == {"Anna", "Ben B.", "Cleo"}
    ClientKeys.read(folder / "clients" / "Cleo")


def test_a_new_host_takes_a_new_certificate_of_the_same_key(folder: Path) -> None:
    before, known = contents(folder), names(folder / "server" / "server.crt")
    assert make_keys(folder, ["new.example.org"], ["Anna"]) == [folder / "server" / "server.crt"]
    after = contents(folder)
    assert before.keys() == after.keys()
    changed = {name for name in after if before[name] != after[name]}
    assert changed == {"server/server.crt"}
    # ClientManager that reach it by the others still do.
    assert names(folder / "server" / "server.crt") == known | {"new.example.org"}
    ServerKeys.read(folder / "server")


def test_an_expired_certificate_is_issued_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "server" / "server.crt").read_bytes()
    in_days(monkeypatch, 1000)
    with pytest.raises(ConfigError, match=r"server.crt: it expired on .*perfed keys"):
        ServerKeys.read(folder / "server")
    assert make_keys(folder, [], []) == [folder / "server" / "server.crt"]
    assert (folder / "server" / "server.crt").read_bytes() != before
    ServerKeys.read(folder / "server")


def test_private_keys_may_have_gone_to_their_machines(folder: Path) -> None:
    """Adding a client takes neither the authority's key, nor the server's, nor other clients'."""
    shutil.rmtree(folder / "clients")
    (folder / "ca.key").unlink()
    (folder / "server" / "server.key").unlink()
    make_keys(folder, [], ["Anna", "Cleo"])
    assert {path.name for path in (folder / "clients").iterdir()} == {"Cleo"}
    assert not (folder / "server" / "server.key").exists()
    with pytest.raises(ConfigError, match=r"ca.key: it is missing.*restore it"):
        make_keys(folder, ["new.example.org"], ["Dora"])
    assert not (folder / "clients" / "Dora").exists()


def test_a_certificate_can_be_issued_without_the_servers_key(folder: Path) -> None:
    key = (folder / "server" / "server.key").read_bytes()
    (folder / "server" / "server.key").unlink()
    assert make_keys(folder, ["b.example.org"], []) == [folder / "server" / "server.crt"]
    certificates.write_file(folder / "server" / "server.key", key)
    ServerKeys.read(folder / "server")


def test_a_client_shut_out_stays_out_until_asked_for(folder: Path) -> None:
    (folder / "server" / "clients" / "Anna.pub").unlink()
    make_keys(folder, [], ["Cleo"])
    assert set(ServerKeys.read(folder / "server").clients) == {"Ben B.", "Cleo"}
    assert make_keys(folder, [], ["Anna"]) == [folder / "server" / "clients" / "Anna.pub"]


def test_a_broken_off_making_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is whole or not there; whichever it stops at, the next time does the rest."""
    fsync, folder = os.fsync, tmp_path / "keys"
    for stop in range(9):
        left = [stop]

        def full(handle: int, left: list[int] = left) -> None:
            if left[0] == 0:
                raise OSError(28, "No space left on device")
            left[0] -= 1
            fsync(handle)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            make_keys(folder, [], ["a"])
        whole = {n: c for n, c in contents(folder).items() if not n.endswith(".partial")}
        assert len(whole) == stop
        monkeypatch.setattr(os, "fsync", fsync)
        make_keys(folder, [], ["a"])
        assert not list(folder.rglob("*.partial"))
        assert whole.items() <= contents(folder).items()
        ServerKeys.read(folder / "server")
        ClientKeys.read(folder / "clients" / "a")
        make_keys(folder, ["new.example.org"], [])  # the authority's key is its own
        ServerKeys.read(folder / "server")
        shutil.rmtree(folder)


def test_another_authority_is_not_mixed_in(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", [], ["a"])
    shutil.copy(tmp_path / "other" / "ca.crt", folder / "ca.crt")
    with pytest.raises(ConfigError, match=r"server.ca.crt is not a copy of"):
        make_keys(folder, [], ["Cleo"])
    (folder / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"keys.ca.crt: it is missing; restore it"):
        make_keys(folder, [], ["Cleo"])


def test_the_authoritys_key_must_be_its_own(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", [], ["a"])
    shutil.copy(tmp_path / "other" / "ca.key", folder / "ca.key")
    with pytest.raises(ConfigError, match=r"ca.key does not belong to ca.crt"):
        make_keys(folder, ["new.example.org"], [])


def test_a_client_has_one_key(folder: Path) -> None:
    shutil.copy(folder / "clients" / "Anna" / "client.pub", folder / "server/clients/Ben B..pub")
    with pytest.raises(ConfigError, match=r"Ben B..pub does not belong to the key .*client.key"):
        make_keys(folder, [], ["Cleo", "Ben B."])
    assert not (folder / "clients" / "Cleo").exists()


@pytest.mark.parametrize(
    "name",
    ["", " ", "a/b", "a\\b", "..", ".a", "a\nb", "a:b", "a\0b", "x" * 101, "~a!"],
)
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a name can have letters"):
        make_keys(tmp_path / "keys", [], ["good", name])
    assert not (tmp_path / "keys").exists()


def test_odd_names_are_not(tmp_path: Path) -> None:
    odd = ["x" * 100, "Zoë-Ærø_1.5 b", "7"]
    make_keys(tmp_path, [], odd)
    assert set(ServerKeys.read(tmp_path / "server").clients) == set(odd)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='client "a": it is named twice'):
        make_keys(tmp_path, [], ["a", "b", "a"])


@pytest.mark.parametrize(
    "host",
    [
        "", "a b", "host:443", "[::1]", "1.2.3", "10.0.0.256", "*.example.org", "-a.org", "a..b",
        "https://a.org", "0.0.0.0", "::", "fe80::1%eth0", "a.org\n", "x" * 64 + ".org", "müller.de",
    ],
)  # fmt: skip
def test_bad_hosts_are_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^host .*; give|^host .*: give"):
        make_keys(tmp_path / "keys", ["good.org", host], ["a"])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("days", [0, -1, 10_000_000])
def test_bad_days_are_refused(days: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a certificate can be valid for 1 to 3650 days"):
        make_keys(tmp_path, [], ["a"], days)


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write keys there"):
        make_keys(tmp_path / "file" / "keys", [], ["a"])


@pytest.mark.parametrize("given", [["10", "9", "1"], ["b", "10", "9", "B"], ["true", "False"]])
def test_clients_come_in_the_order_that_their_data_have(given: list[str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", [], given)
    (tmp_path / "data").mkdir()
    for name in given:
        (tmp_path / "data" / f"{name}.csv").write_text("")
    expected = [path.stem for path in own.list_client_files(tmp_path / "data")]
    assert list(ServerKeys.read(tmp_path / "keys" / "server").clients) == expected


def test_what_is_read_is_where_it_is(made: Path) -> None:
    server, client = made / "server", made / "clients" / "Anna"
    read = ServerKeys.read(server)
    assert (read.certificate, read.key, read.authority) == (
        server / "server.crt", server / "server.key", server / "ca.crt",
    )  # fmt: skip
    assert ClientKeys.read(client) == ClientKeys(client / "client.key", client / "ca.crt")


@pytest.mark.parametrize("name", ["server.crt", "server.key", "ca.crt"])
def test_a_server_without_a_file_is_told(name: str, folder: Path) -> None:
    (folder / "server" / name).unlink()
    with pytest.raises(ConfigError, match=rf"there is no (such file|{name}).*`perfed keys`"):
        ServerKeys.read(folder / "server")


@pytest.mark.parametrize("name", ["server.crt", "server.key", "ca.crt", "clients/Anna.pub"])
def test_a_server_with_a_spoilt_file_is_told(name: str, folder: Path) -> None:
    (folder / "server" / name).write_text("spoilt")
    with pytest.raises(ConfigError, match=rf"{name}: it is not a .*`perfed keys`"):
        ServerKeys.read(folder / "server")


def test_a_server_that_is_given_the_whole_folder_is_told(made: Path) -> None:
    with pytest.raises(ConfigError, match=r"no server.crt in it; give a folder like `server`"):
        ServerKeys.read(made)
    with pytest.raises(ConfigError, match=r"no client.key in it; .*like `clients/NAME`"):
        ClientKeys.read(made)


def test_a_server_with_anothers_key_is_told(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", [], ["a"])
    shutil.copy(tmp_path / "other" / "server" / "server.key", folder / "server" / "server.key")
    with pytest.raises(ConfigError, match=r"server.crt does not belong to the key .*server.key"):
        ServerKeys.read(folder / "server")


def test_a_server_with_anothers_authority_is_told(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", [], ["a"])
    shutil.copy(tmp_path / "other" / "ca.crt", folder / "server" / "ca.crt")
    with pytest.raises(ConfigError, match=r"server.crt was not issued by the authority .*ca.crt"):
        ServerKeys.read(folder / "server")


def test_a_servers_certificate_is_no_authority(folder: Path) -> None:
    shutil.copy(folder / "server" / "server.crt", folder / "server" / "ca.crt")
    with pytest.raises(ConfigError, match=r"ca.crt: it is not the certificate of an authority"):
        ServerKeys.read(folder / "server")


def test_a_server_without_clients_is_told(folder: Path) -> None:
    shutil.rmtree(folder / "server" / "clients")
    with pytest.raises(ConfigError, match=r"there are no clients; create .*`perfed keys`"):
        ServerKeys.read(folder / "server")


def test_two_clients_with_one_key_are_told(folder: Path) -> None:
    clients = folder / "server" / "clients"
    shutil.copy(clients / "Anna.pub", clients / "Cleo.pub")
    with pytest.raises(ConfigError, match='"Anna" and "Cleo" have the same key'):
        ServerKeys.read(folder / "server")


def test_what_file_managers_leave_is_no_client(folder: Path) -> None:
    (folder / "server" / "clients" / "._Anna.pub").write_text("")
    assert len(ServerKeys.read(folder / "server").clients) == 2


def in_days(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """From now on it is that many days later."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=days)

    monkeypatch.setattr(certificates, "datetime", Later)


@pytest.mark.parametrize(
    ("days", "says"),
    [(-3, "is valid from .* check the clock"), (4000, "expired .*create all")],
)
def test_an_authority_has_its_time(
    days: int, says: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_days(monkeypatch, days)
    for read in (
        lambda: ServerKeys.read(made / "server"),
        lambda: ClientKeys.read(made / "clients" / "Anna"),
        lambda: make_keys(made, [], ["Cleo"]),
    ):
        with pytest.raises(ConfigError, match=rf"ca.crt: it {says}"):
            read()


def test_no_certificate_outlives_its_authority(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_days(monkeypatch, 3600)
    make_keys(folder, ["late.example.org"], [])
    last = certificate(folder / "server" / "server.crt").not_valid_after_utc
    assert last == certificate(folder / "ca.crt").not_valid_after_utc


@pytest.mark.parametrize("name", ["client.key", "ca.crt"])
def test_a_client_without_a_file_is_told(name: str, folder: Path) -> None:
    (folder / "clients" / "Anna" / name).unlink()
    with pytest.raises(ConfigError, match=rf"there is no (such file|{name}).*`perfed keys`"):
        ClientKeys.read(folder / "clients" / "Anna")


def test_a_client_with_a_key_that_flower_cannot_read_is_told(folder: Path) -> None:
    key = folder / "clients" / "Anna" / "client.key"
    shutil.copy(folder / "server" / "server.key", key)  # PKCS 8
    with pytest.raises(ConfigError, match=r"client.key: it is not .* OpenSSH's format"):
        ClientKeys.read(key.parent)


def test_a_client_with_anothers_key_is_told(folder: Path) -> None:
    shutil.copy(folder / "clients/Ben B./client.key", folder / "clients/Anna/client.key")
    with pytest.raises(ConfigError, match=r"client.pub does not belong to the key"):
        ClientKeys.read(folder / "clients" / "Anna")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_can_read_is_told(mode: int, folder: Path) -> None:
    for key in (folder / "clients" / "Anna" / "client.key", folder / "server" / "server.key"):
        key.chmod(mode)
    with pytest.raises(ConfigError, match=r"other users can read.*chmod 600 .*client.key"):
        ClientKeys.read(folder / "clients" / "Anna")
    with pytest.raises(ConfigError, match=r"other users can read.*chmod 600 .*server.key"):
        ServerKeys.read(folder / "server")
