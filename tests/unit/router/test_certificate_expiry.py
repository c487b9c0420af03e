"""When a certificate ends, as openssl says it too."""

import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.common.tls import expiry_of
from tests.certificates import Authority


def as_openssl_says(path: Path) -> float:
    asked = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=30).stdout
    return ssl.cert_time_to_seconds(told.strip().partition("=")[2])


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.mark.parametrize("days", [-1, 2, 90, 20_000, 40_000])
def test_it_is_what_openssl_says(ca: Authority, days: int) -> None:
    """Years from 2050 on are written in another way."""
    made = ca.sign("one", days=days).certificate
    assert expiry_of(made.read_bytes()) == as_openssl_says(made)


def test_of_a_chain_it_is_the_servers_own(ca: Authority) -> None:
    own = ca.sign("one", days=1)
    chain = b"a comment\n" + own.key.read_bytes() + own.certificate.read_bytes()
    assert expiry_of(chain + ca.certificate.read_bytes()) == as_openssl_says(own.certificate)


@given(noise=st.binary(max_size=300), at=st.integers(0, 500), byte=st.integers(0, 255))
def test_what_is_odd_is_no_fault(ca: Authority, noise: bytes, at: int, byte: int) -> None:
    whole = ssl.PEM_cert_to_DER_cert(ca.certificate.read_text())
    for der in (noise, whole[:at], whole[:at] + bytes((byte,)) + whole[at + 1 :]):
        expiry_of(ssl.DER_cert_to_PEM_cert(der).encode())
    assert expiry_of(noise) is None
    assert (
        expiry_of(b"-----BEGIN CERTIFICATE-----\n%b\n-----END CERTIFICATE-----" % b"\xff") is None
    )
