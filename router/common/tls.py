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
from typing import NamedTuple

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


class CertificateFiles(NamedTuple):
    """The files of a certificate chain and its key, which may be the same file."""

    certificate: Path
    key: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.certificate,) if self.key is None else (self.certificate, self.key)


class TlsContext:
    """An SSLContext and its certificate's files, if it has a certificate.

    `files` watches them; `expires_at` is the Unix time when the certificate expires.
    """

    def __init__(self, context: ssl.SSLContext, pair: CertificateFiles | None) -> None:
        """Raises ValueError, in one line, for files that cannot be used."""
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.context = context
        self.files: WatchedFiles | None = None
        self.expires_at: float | None = None
        self._pair = pair
        if pair is not None:
            self.files = WatchedFiles(pair.files, MAX_FILE_BYTES, self._reload, self._log)

    def _reload(self, content: tuple[bytes, ...]) -> None:
        """Load the files. Raises ValueError.

        An unused context tries them first, because a failure would leave a mixed pair behind.
        """
        assert self._pair is not None
        _load(ssl.SSLContext(self.context.protocol), self._pair)
        _load(self.context, self._pair)
        self.expires_at = expiry_of(content[0])
        if self.files is not None:
            logger.info("%s: new handshakes have this certificate", self._pair.certificate)

    def _log(self, trouble: str) -> None:
        assert self._pair is not None
        if trouble:
            logger.error("the certificate stays as it is: %s: %s", self._pair.certificate, trouble)
        else:
            logger.info("%s can be used again", self._pair.certificate)


def server_context(pair: CertificateFiles, client_ca: Path | None) -> TlsContext:
    """Return a context for clients; `client_ca` requires client certificates. Raises ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return TlsContext(context, pair)


def client_context(ca: Path | None, pair: CertificateFiles | None) -> TlsContext:
    """Return a context for engines, which verifies certificate and name. Raises ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.load_default_certs()
    else:
        _trust(context, ca)
    return TlsContext(context, pair)


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except OSError as error:
        raise ValueError(f"{ca}: {_reason(error)}") from None


def _load(context: ssl.SSLContext, pair: CertificateFiles) -> None:
    """Raises ValueError, also for an encrypted key, because its password cannot be entered."""
    try:
        context.load_cert_chain(pair.certificate, pair.key, password=_refuse_password)
    except OSError as error:
        where = "" if pair.key is None else f" and {pair.key}"
        raise ValueError(f"{pair.certificate}{where}: {_reason(error)}") from None


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
