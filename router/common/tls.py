"""TLS contexts that reload their certificate when its files change.

The lowest version is TLS 1.2. A context is changed in place: later handshakes use the new
certificate, existing connections continue. Files that do not fit together change nothing.
"""

from __future__ import annotations

import logging
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from router.common.watched_file import WatchedFiles

logger = logging.getLogger("disagg_router.tls")
MAX_FILE_BYTES = 1024 * 1024
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# The validity of a certificate in DER: a sequence of two times, each in one of the two formats that
# RFC 5280 (4.1.2.5) admits. UTCTime has two digits of a year.
VALIDITY = re.compile(
    rb"\x30[\x1e\x20\x22](?:\x17\x0d[0-9]{12}Z|\x18\x0f[0-9]{14}Z)"
    rb"(?:\x17\x0d(?P<utc>[0-9]{12}Z)|\x18\x0f(?P<generalized>[0-9]{14}Z))"
)


class TlsContext:
    """An SSLContext and its certificate's files, if it has a certificate.

    `paths` are those of the certificate chain and, if it is another file, of its key. `files`
    watches them; `expires_at` is the Unix time when the certificate expires.
    """

    def __init__(self, context: ssl.SSLContext, paths: tuple[Path, ...]) -> None:
        """Raises ValueError, in one line, for files that cannot be used."""
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.context = context
        self.files: WatchedFiles | None = None
        self.expires_at: float | None = None
        self._paths = paths
        if paths:
            self.files = WatchedFiles(paths, MAX_FILE_BYTES, self._reload, self._log)

    def _reload(self, content: tuple[bytes, ...]) -> None:
        """Load the files. Raises ValueError.

        An unused context tries them first, because a failure would leave a mixed pair behind.
        """
        _load(ssl.SSLContext(self.context.protocol), self._paths)
        _load(self.context, self._paths)
        self.expires_at = expiry_of(content[0])
        if self.files is not None:
            logger.info("%s: new handshakes use this certificate", self._paths[0])

    def _log(self, trouble: str) -> None:
        if trouble:
            logger.error("the certificate stays as it is: %s: %s", self._paths[0], trouble)
        else:
            logger.info("%s can be used again", self._paths[0])


def server_context(paths: tuple[Path, ...], client_ca: Path | None) -> TlsContext:
    """Return a context for clients; `client_ca` requires client certificates. Raises ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return TlsContext(context, paths)


def client_context(ca: Path | None, paths: tuple[Path, ...]) -> TlsContext:
    """Return a context for engines, which verifies certificate and name. Raises ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.load_default_certs()
    else:
        _trust(context, ca)
    return TlsContext(context, paths)


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except OSError as error:
        raise ValueError(f"{ca}: {_reason(error)}") from None


def _load(context: ssl.SSLContext, paths: tuple[Path, ...]) -> None:
    """Raises ValueError, also for an encrypted key, because its password cannot be entered."""
    try:
        context.load_cert_chain(paths[0], paths[-1], _refuse_password)
    except OSError as error:
        raise ValueError(f"{' and '.join(map(str, paths))}: {_reason(error)}") from None


def _refuse_password() -> str:
    raise ValueError("the private key is encrypted")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return reason or "not PEM"
    return error.strerror or str(error)


def expiry_of(chain: bytes) -> float | None:
    """Return the Unix time when the first certificate of a PEM chain expires, or None.

    The standard library decodes only the other side's certificate, so the time is read out of the
    DER. The chain was loaded as a certificate before; anything unusual gives None.
    """
    try:
        found = PEM.search(chain)
        der = b"" if found is None else ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
        validity = VALIDITY.search(der)
        if validity is None:
            return None
        text = (validity["utc"] or validity["generalized"]).decode()
        if validity["utc"]:
            text = ("20" if text < "50" else "19") + text
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
