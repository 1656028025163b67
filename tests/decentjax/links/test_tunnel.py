"""Certificates of jobs, and tunnels between peers: who gets in, and who does not."""

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import gossip, worker_mesh
from decentjax.distributed.credentials import FILES, check_credentials
from decentjax.links import Links, Piece, Said, transport, tunnel
from decentjax.links.tunnel import (
    MAX_GUESTS,
    contexts,
    host_tunnel,
    listen,
)
from decentjax.process.address import to_address
from tests.checkout import ENV, ROOT
from tests.handshakes import SECRET, guest_of
from tests.jobs import LONG, started
from tests.parties import party_of
from train.job.certificates import certificates

IS_NEW = jax.__version_info__ >= (0, 12)


def context_of(variables, kind):
    certificate, key, authority = (variables[name] for name in FILES)
    context = ssl.SSLContext(kind)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    return context


def shake(host, guest):
    """What each end of a connection says of the other."""
    ends, said = socket.socketpair(), {}

    def run(name, context, **kwargs):
        try:
            with context.wrap_socket(ends[name], **kwargs) as tls:
                tls.sendall(b"x")
                said[name] = tls.recv(1)
        except (ssl.SSLError, OSError) as error:
            said[name] = type(error).__name__

    thread = threading.Thread(target=run, args=(0, host), kwargs={"server_side": True})
    thread.start()
    run(1, guest)
    thread.join()
    return [said[0], said[1]]


@pytest.mark.skipif(not IS_NEW, reason="jax takes certificates from 0.12 on")
def test_processes_of_one_job_know_each_other_and_no_others():
    server, client = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    with certificates({}) as own, certificates({}) as other:
        assert os.stat(own[FILES[1]]).st_mode & 0o077 == 0
        assert own["JAX_MTLS_PEER_URI_PREFIX"] != other["JAX_MTLS_PEER_URI_PREFIX"]
        host = context_of(own, server)
        assert shake(host, context_of(own, client)) == [b"x", b"x"]
        assert b"x" not in shake(host, context_of(other, client))
    assert not os.path.exists(own[FILES[1]])


def test_certificates_of_ones_own_and_an_older_jax_get_none():
    with certificates(dict.fromkeys(FILES, "a.pem")) as variables:
        assert variables == {}
    if not IS_NEW:
        with certificates({}) as variables:
            assert variables == {}


JOB = """
import sys, time
import jax, jax.numpy as jnp
from decentjax import distributed, over_workers, place

mesh = distributed.initialize()
print("joined", flush=True)
if jax.process_index() == 0:
    sys.stdin = open(sys.argv[1])  # Until the stranger has been here.
    sys.stdin.read()
total = over_workers(lambda x: jax.lax.psum(x, "workers"), mesh)
print(jax.jit(total)(place(jnp.ones(1), mesh)).addressable_data(0))
"""
STRANGER = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, 1, initialization_timeout=5)
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_NEW, reason="jax takes certificates from 0.12 on")
def test_a_stranger_does_not_end_a_job_of_the_launcher(tmp_path):
    script, pipe = tmp_path / "script.py", tmp_path / "pipe"
    script.write_text(JOB)
    os.mkfifo(pipe)
    launcher = (sys.executable, "-m", "train.launch", "-n", "2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started(*launcher, "--port", str(port), str(script), str(pipe)) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "joined" in line:
                break
        stranger = [sys.executable, "-c", STRANGER, f"127.0.0.1:{port}"]
        done = subprocess.run(
            stranger, env=ENV, cwd=ROOT, capture_output=True, timeout=LONG, check=False
        )
        assert done.returncode != 0
        pipe.write_text("go on")
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 0, output
    assert len(re.findall(r"\[2\.\]", output)) == 2


def test_peers_that_cannot_encrypt_get_a_sentence(monkeypatch, tmp_path):
    options = {"book": gossip.Folder(tmp_path), "workers": [0], "mesh": worker_mesh(1)}
    with pytest.raises(ValueError, match="have their keys from the secret, got None"):
        gossip.PeerProcess(**options, encrypted=True)
    gossip.PeerProcess(**options, encrypted=True, secret=SECRET)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'decentjax\[tls\]'"):
        gossip.PeerProcess(**options, encrypted=True, secret=SECRET)


def test_encrypted_peers_train_together_and_not_with_others(tmp_path):
    """On one machine, where handshakes alone need TLS."""
    common = {"secret": SECRET, "encrypted": True}
    book, channels = gossip.Folder(tmp_path), [[Piece((3,), np.float32)]]
    made = []
    for worker, more in enumerate([common, common, common | {"secret": SECRET * 2}]):
        party = party_of(book, [worker], jax.devices()[:1], **more)
        made.append(Links(party, 3, channels))
    one, two, stranger = made
    deadline = time.monotonic() + 60
    while not (1 in one.alive() and 0 in two.alive() and 2 in one.refused):
        assert time.monotonic() < deadline, one.refused
        time.sleep(0.01)
    assert "does not encrypt, or has another secret" in one.refused[2]
    one.publish(0, 1, 0, [jnp.arange(3.0)], Said(4))
    message = two.wait(1, 0, 0, 4, deadline)
    np.testing.assert_array_equal(message.arrays[0], [0, 1, 2])
    assert not stranger.alive()
    for links in made:
        links.close()


@pytest.fixture
def target():
    """A server on a loopback address of its own, which echoes."""
    with socket.create_server(("127.0.0.2", 0)) as server:

        def echo(connection):
            with connection:
                while data := connection.recv(2**16):
                    connection.sendall(data)

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield to_address(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)


def tunnels(target, guest_secret=SECRET):
    host = host_tunnel(
        listen("127.0.0.1"), contexts(SECRET).host, ["127.0.0.2:1", target]
    )
    return host, guest_of(host, guest_secret)


def test_a_tunnel_carries_all_bytes_both_ways_at_once(target):
    host, guest = tunnels(target)
    sent = np.random.default_rng(0).bytes(5_000_000)
    with socket.create_connection(guest.addresses[1]) as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        came = bytearray()
        while len(came) < len(sent):
            came += connection.recv(2**16)
        sender.join()
    assert bytes(came) == sent
    host.close()
    guest.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(guest.addresses[1])


def test_who_does_not_know_the_secret_gets_nothing_through(target):
    host, guest = tunnels(target, guest_secret=b"another secret, as long")
    with socket.create_connection(guest.addresses[1]) as connection:
        connection.sendall(b"hello")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    with socket.create_connection(host.addresses[0]) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        connection.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):  # An alert, and the end.
                pass
    # It goes on for those who do.
    other = guest_of(host, SECRET)
    with socket.create_connection(other.addresses[1]) as connection:
        connection.sendall(b"hello")
        assert connection.recv(10) == b"hello"


@pytest.fixture
def says():
    """A function that returns the address of what accepts, sends bytes, and closes."""
    servers = []

    def serving(data):
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        return to_address(*server.getsockname())

    yield serving
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.parametrize("size", [1, 100_000, 5_000_000])
def test_what_an_end_sends_before_it_closes_arrives(says, size):
    _, guest = tunnels(says(bytes(size)))
    for _ in range(3):
        with socket.create_connection(guest.addresses[1]) as connection:
            came = 0
            while data := connection.recv(2**16):
                came += len(data)
        assert came == size


def test_a_tunnel_whose_reader_waits_takes_no_time(says, monkeypatch):
    steps, step = [], tunnel._step
    monkeypatch.setattr(tunnel, "_step", lambda *args: steps.append(1) or step(*args))
    _, guest = tunnels(says(bytes(50_000_000)))
    with socket.create_connection(guest.addresses[1]):
        time.sleep(2)
        before = len(steps)
        time.sleep(1)
        assert before > 10
        assert len(steps) < before + 10


def test_connections_that_say_nothing_close_no_tunnel(target):
    host, guest = tunnels(target)
    before, silent = threading.active_count(), []
    with contextlib.ExitStack() as open_ones:
        for _ in range(4 * MAX_GUESTS):
            silent += [socket.create_connection(host.addresses[0])]
            open_ones.enter_context(silent[-1])
        # The oldest ones end, and not only after their time.
        assert silent[0].recv(1) == b""
        assert threading.active_count() < before + 2 * MAX_GUESTS
        with socket.create_connection(guest.addresses[1]) as connection:
            connection.sendall(b"hello")
            assert connection.recv(10) == b"hello"


SHORT_OF_FILES = """
import contextlib, resource, socket, threading, time
from decentjax.links.tunnel import contexts, host_tunnel, listen
from decentjax.process.address import to_address
from tests.handshakes import SECRET, guest_of

server = socket.create_server(("127.0.0.1", 0))

def echo():
    while True:
        one = server.accept()[0]
        one.sendall(one.recv(10))

threading.Thread(target=echo, daemon=True).start()
there = to_address(*server.getsockname())
host = host_tunnel(listen("127.0.0.1"), contexts(SECRET).host, [there, there])
guest = guest_of(host, SECRET)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
held, waiting = [], [socket.socket() for _ in range(5)]
with contextlib.suppress(OSError):
    while True:
        held.append(open("/dev/null"))
for one in waiting:
    one.connect(host.addresses[0])
end = time.monotonic() + 1
while time.monotonic() < end:  # Its host has no file left to accept them.
    with contextlib.suppress(OSError):
        held.append(open("/dev/null"))
for one in held:
    one.close()
for _ in range(100):
    with contextlib.suppress(OSError):
        with socket.create_connection(guest.addresses[1], 10) as connection:
            connection.sendall(b"hello")
            if connection.recv(10) == b"hello":
                print("answers")
                break
"""


@pytest.mark.slow
def test_a_process_that_was_short_of_files_is_reached_again():
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_FILES],
        cwd=ROOT,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.stdout == "answers\n", done.stderr


def locked(folder, given):
    """The job's key, with a password, for which a terminal would be asked."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    with open(given[FILES[1]], "rb") as file:
        key = serialization.load_pem_private_key(file.read(), None)
    form = serialization.PrivateFormat.PKCS8
    locks = serialization.BestAvailableEncryption(b"a password")
    path = folder / "locked.pem"
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locks))
    return path


@pytest.mark.skipif(not IS_NEW, reason="jax takes certificates from 0.12 on")
def test_files_that_cannot_work_are_named_before_the_start(tmp_path, monkeypatch):
    with certificates({}) as given, certificates({}) as other:
        monkeypatch.setattr(os, "environ", {**given})
        check_credentials()
        wrong = tmp_path / "wrong.pem"
        wrong.write_text("no certificate")
        for name, path, words in (
            (FILES[0], str(tmp_path / "none.pem"), "none.pem.*No such file"),
            (FILES[0], str(wrong), "wrong.pem"),
            (FILES[1], str(locked(tmp_path, given)), "locked.pem"),
            (FILES[1], other[FILES[1]], "mismatch"),
            (FILES[2], other[FILES[2]], "self-signed|unable to get"),
            (FILES[2], "", f"set {FILES[2]} too, or none"),
        ):
            monkeypatch.setattr(os, "environ", {**given, name: path})
            with pytest.raises(ValueError, match=words):
                check_credentials()
        monkeypatch.setattr(os, "environ", {})
        check_credentials()


@pytest.mark.slow
@pytest.mark.skipif(not IS_NEW, reason="jax takes certificates from 0.12 on")
@pytest.mark.parametrize(
    "command",
    [
        ("-c", "from decentjax import distributed; distributed.initialize()"),
        ("-m", "train", "quickstart", "--distributed.enabled"),
    ],
    ids=["script", "train"],
)
def test_a_process_with_such_files_ends_before_it_waits(command, tmp_path):
    if "train" in command:
        command += "--run-dir", str(tmp_path / "run")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "LOCAL_RANK": "0"}
    place |= {"RANK": "1", "WORLD_SIZE": "2"}  # Process 0 never comes.
    wrong = dict.fromkeys(FILES, str(tmp_path / "none.pem"))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | ENV | place | wrong,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert "mutual TLS of a job needs" in done.stderr + done.stdout
    assert done.returncode == 1  # Not 70, after which a launcher starts it again.


@pytest.mark.skipif(not IS_NEW, reason="jax takes certificates from 0.12 on")
def test_a_certificate_that_is_over_is_named(monkeypatch):
    monkeypatch.setattr("train.job.certificates.DAYS", -0.5)
    with certificates({}) as given:
        monkeypatch.setattr(os, "environ", {**given})
        with pytest.raises(ValueError, match="has expired"):
            check_credentials()


def test_encrypted_and_plain_peers_name_each_other(tmp_path):
    book = gossip.Folder(tmp_path)
    pieces = [[Piece((3,), np.dtype("float32"))]]
    one, other = (
        Links(
            party_of(book, [i], jax.devices()[:1], secret=SECRET, encrypted=bool(i)),
            2,
            pieces,
            "",
        )
        for i in range(2)
    )
    end = time.monotonic() + 60
    while not (one.refused and other.refused) and time.monotonic() < end:
        one.alive(), other.alive()
        time.sleep(0.05)
    assert "closes without a word: it encrypts" in one.refused[1]
    assert "does not encrypt" in other.refused[0]
    one.close()
    other.close()


def test_only_programs_of_the_same_user_stand_in_for_a_tunnel(monkeypatch):
    with listen("127.0.0.9") as listener:
        address = to_address(*listener.getsockname())
        assert address in transport._listening("127.0.0.9")
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert address not in transport._listening("127.0.0.9")
