"""The certificates that a user gives a job, checked before jax uses them.

jax would wait for its time limit, and abort with a message that names no file.
"""

import os
import ssl

FILES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")


def check_credentials() -> None:
    """Raises a ValueError where the files of jax's mutual TLS cannot work."""
    import jax  # The launcher takes `FILES` from here, and must not import it.

    given = {name: os.environ.get(name, "") for name in FILES}
    # jax 0.10 knows none of them.
    if not (any(given.values()) and hasattr(jax.config, "jax_mtls_cert_file")):
        return
    if missing := [name for name, path in given.items() if not path]:
        raise ValueError(
            f"mutual TLS of a job needs all of {', '.join(FILES)}: set "
            f"{' and '.join(missing)} too, or none"
        )
    certificate, key, authority = given.values()
    try:
        for path in given.values():
            with open(path, "rb"):
                pass
        host, guest = (
            ssl.SSLContext(kind)
            for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )
        for one in (host, guest):
            one.check_hostname, one.verify_mode = False, ssl.CERT_NONE
            # Without a password OpenSSL would ask for it at the terminal.
            one.load_cert_chain(certificate, key, password=lambda: "")
        host.verify_mode = ssl.CERT_REQUIRED
        host.load_verify_locations(authority)
        _shake_hands(host, guest)
    except OSError as error:  # An SSLError is one.
        why = getattr(error, "verify_message", "") or error.strerror or str(error)
        named = ", ".join(f"{name}={path}" for name, path in given.items())
        raise ValueError(
            f"mutual TLS of a job needs a certificate that its authority has signed, "
            f"with its key, in PEM format, got {named}: {why}"
        ) from error


def _shake_hands(host: ssl.SSLContext, guest: ssl.SSLContext) -> None:
    """Lets a host check the certificate of a guest, in memory."""
    to_host, to_guest = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        guest.wrap_bio(to_guest, to_host),
        host.wrap_bio(to_host, to_guest, server_side=True),
    )
    waiting = [*ends]
    while waiting:
        for end in [*waiting]:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
