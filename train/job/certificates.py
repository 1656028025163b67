"""Certificates by which the processes of one launcher's job know each other.

From jax 0.12 on the coordinator takes them; the library "cryptography" makes them.
"""

import contextlib
import datetime
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from decentjax.distributed.credentials import FILES

PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
CHECKED = "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS"
DAYS = 90  # Of a job of one machine; the key is gone when the launcher ends.


@contextlib.contextmanager
def certificates(given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Variables by which the processes of a job refuse all others; none where jax or
    the library lacks what is needed, or the user has given files.

    Args:
      given: environment variables of the launcher.
    """
    if not _are_known() or any(name in given for name in FILES):
        yield {}
        return
    with tempfile.TemporaryDirectory("-decentjax") as folder:  # Only its owner's.
        job = f"decentjax://{secrets.token_hex(16)}/"
        certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
        _make(job, certificate, key)
        # It is its own authority: no other certificate is accepted.
        files = zip(FILES, (certificate, key, certificate), strict=True)
        variables = {name: str(path) for name, path in files}
        yield variables | {PREFIX: job, CHECKED: "1"}


def _are_known() -> bool:
    try:
        version("cryptography")
        numbers = version("jax").split(".")[:2]
    except PackageNotFoundError:
        return False
    return tuple(map(int, numbers)) >= (0, 12)


def _make(job: str, certificate: Path, key: Path) -> None:
    """Writes a new key, and a certificate that names a job."""
    # Slow to import, and not there everywhere.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "decentjax job")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        # A clock that is set back a little must not end a job.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(job)]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(own, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    certificate.write_bytes(made.public_bytes(pem))
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.touch(0o600)
    key.write_bytes(own.private_bytes(pem, form, none))
