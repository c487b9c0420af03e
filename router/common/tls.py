"""TLS on either side, of files: contexts that take over a new certificate when its files change.

Nothing below TLS 1.2 is spoken. A context is changed in place: handshakes from then on have the new
certificate, connections that exist go on. A pair that does not fit leaves everything as it was.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NamedTuple

from router.common.certificate_expiry import end_of
from router.common.watched_file import Watched

logger = logging.getLogger("disagg_router.tls")
MOST_BYTES = 1024 * 1024


class Pair(NamedTuple):
    """A certificate chain and its key, which may be in the same file."""

    certificate: Path
    key: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.certificate,) if self.key is None else (self.certificate, self.key)


class Secured:
    """A context, and the pair that is in it, if it has one: `file` watches that; `end` is the Unix
    time when its certificate ends."""

    def __init__(self, context: ssl.SSLContext, pair: Pair | None) -> None:
        """Raises ValueError, in one line, for a pair that cannot be used."""
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.context = context
        self.file: Watched | None = None
        self.end: float | None = None
        self._pair = pair
        if pair is not None:
            self.file = Watched(pair.files, MOST_BYTES, self._take, self._said)

    def _take(self, content: tuple[bytes, ...]) -> None:
        """Raises ValueError. First into a context that nobody uses: a half that is new and one
        that is old would be none."""
        assert self._pair is not None
        _load(ssl.SSLContext(self.context.protocol), self._pair)
        _load(self.context, self._pair)
        self.end = end_of(content[0])
        if self.file is not None:
            logger.info("%s: new handshakes have this certificate", self._pair.certificate)

    def _said(self, trouble: str) -> None:
        assert self._pair is not None
        if trouble:
            logger.error("the certificate stays as it is: %s: %s", self._pair.certificate, trouble)
        else:
            logger.info("%s can be used again", self._pair.certificate)


def serving(pair: Pair, client_ca: Path | None) -> Secured:
    """For clients; with a `client_ca` none comes in without a certificate of it. Raises
    ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return Secured(context, pair)


def asking(ca: Path | None, pair: Pair | None) -> Secured:
    """For engines, whose certificate and name are checked. Raises ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.load_default_certs()
    else:
        _trust(context, ca)
    return Secured(context, pair)


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    """Raises ValueError."""
    try:
        context.load_verify_locations(cafile=ca)
    except OSError as error:
        raise ValueError(f"{ca}: {_why(error)}") from None


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """Raises ValueError. A key that wants a password is refused: nobody is there to be asked."""
    try:
        context.load_cert_chain(pair.certificate, pair.key, password=_refuse)
    except OSError as error:
        where = "" if pair.key is None else f" and {pair.key}"
        raise ValueError(f"{pair.certificate}{where}: {_why(error)}") from None


def _refuse() -> str:
    raise ValueError("the private key is encrypted")


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return reason or "not as it is in PEM"
    return error.strerror or str(error)
