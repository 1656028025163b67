"""Certificates of jobs, and TLS between peers: who gets in, and who does not."""

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
from decentjax.links import Links, Piece, Said
from tests.checkout import ENV, ROOT
from tests.handshakes import SECRET
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
        time.sleep(0.05)
    assert "closes without a word: it encrypts" in one.refused[1]
    assert "does not encrypt" in other.refused[0]
    one.close()
    other.close()
