"""TLS between processes that share a secret, with keys that are derived from it."""

import datetime
import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple

_NAME = "decentjax peers"


class Contexts(NamedTuple):
    """The TLS contexts of a process, in which it answers and asks others."""

    host: ssl.SSLContext
    guest: ssl.SSLContext


def contexts(secret: bytes) -> Contexts:
    """Returns the TLS contexts of processes that share a secret.

    Raises:
      ModuleNotFoundError: if the library "cryptography" is missing.
    """
    host, guest = (
        ssl.SSLContext(kind)
        for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    with tempfile.TemporaryDirectory("-decentjax") as folder:  # Only its owner's.
        path = Path(folder, "pair.pem")
        path.touch(0o600)
        certificate, key = _pair(secret)
        path.write_bytes(certificate + key)
        for one in (host, guest):
            one.check_hostname = False  # Who knows the secret is a peer.
            one.verify_mode = ssl.CERT_REQUIRED
            one.minimum_version = ssl.TLSVersion.TLSv1_3
            one.load_cert_chain(path)
            one.load_verify_locations(cadata=certificate.decode())
    return Contexts(host, guest)


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    """A certificate and its key, the same in all processes with the secret."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seed = HKDF(hashes.SHA256(), 32, None, b"decentjax peers").derive(secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)  # Its signatures draw nothing.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        # Without an end: clocks of peers may differ, and the secret itself has no end.
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2999, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    none = serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, form, none)
