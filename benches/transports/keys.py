"""Certificates and keys of the carriers that encrypt."""

import datetime
import importlib.util
from pathlib import Path


def write_keys(folder: Path) -> None:
    """Writes ca.pem, a peer.pem that it has signed, and with pyzmq curve.key*."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "peer")}
    names = {
        name: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in keys
    }
    now = datetime.datetime.now(datetime.UTC)
    for name, key in keys.items():
        certificate = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(name == "ca", None), True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
            .sign(keys["ca"], hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        path = folder / f"{name}.pem"
        path.touch(0o600)
        path.write_bytes(
            certificate.public_bytes(pem) + key.private_bytes(pem, form, none)
        )
    if importlib.util.find_spec("zmq"):
        import zmq.auth  # pyright: ignore[reportMissingImports]

        zmq.auth.create_certificates(folder, "curve")
