"""An authority for a test, and what it signs: made by openssl, in files."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


@dataclass(frozen=True)
class Signed:
    certificate: Path
    key: Path

    def put(self, at: Path) -> Signed:
        """The same in files of other names, over what is there."""
        other = Signed(at / "certificate.pem", at / "key.pem")
        for mine, its in ((self.certificate, other.certificate), (self.key, other.key)):
            fresh = its.with_suffix(".fresh")
            fresh.write_bytes(mine.read_bytes())
            fresh.replace(its)
        return other


class Authority:
    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.certificate, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl("req", "-x509", *CURVE, "-days", "2", "-subj", f"/CN={name}",
                 "-addext", "keyUsage=critical,keyCertSign", "-out", str(self.certificate),
                 "-keyout", str(self._key))  # fmt: skip

    def sign(self, name: str, at: str = "IP:127.0.0.1", days: int = 2) -> Signed:
        """For a host, or whatever else can be an alternative name; of -1 days, it is over."""
        request, extra = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        made = Signed(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        _openssl("req", "-new", *CURVE, "-subj", f"/CN={name}", "-out", str(request), "-keyout",
                 str(made.key))  # fmt: skip
        extra.write_text(f"subjectAltName={at}\n")
        _openssl("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey",
                 str(self._key), "-CAcreateserial", "-days", str(days), "-extfile", str(extra),
                 "-out", str(made.certificate))  # fmt: skip
        return made

    def trusting(self, own: Signed | None = None) -> ssl.SSLContext:
        """What a client has that trusts this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.certificate)
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context

    def serving(self, own: Signed, wants_clients: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own.certificate, own.key)
        if wants_clients:
            context.load_verify_locations(self.certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
