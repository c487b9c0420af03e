"""Names and their addresses, asked of a real server over UDP and TCP."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import dns.asyncresolver
import dns.rcode
import pytest

from router.fleet.engine import EngineRole
from router.fleet.sources import dns as dns_module
from router.fleet.sources.dns import EMPTY_TTL_S, MAX_TTL_S, MIN_TTL_S, DnsSource, look_up
from router.fleet.sources.source import SourceReport
from router.settings import Address
from tests.unit.router.fleet.sources.dns_server import Zone, name_server
from tests.unit.router.harness import eventually

NAME = "decode.svc:8200"
SERVICE = "_http._tcp.decode.svc"


@pytest.fixture
async def zone() -> AsyncIterator[Zone]:
    async with name_server() as made:
        yield made


def source(zone: Zone, name: str = NAME) -> DnsSource:
    return DnsSource(
        EngineRole.DECODE, name, zone.resolver, confirm_interval=0.01, random_share=lambda: 1.0
    )


def addresses(report: SourceReport) -> set[str]:
    assert report.listed is not None, report.problem
    assert all(one.role is EngineRole.DECODE for one in report.listed)
    return {str(one.address) for one in report.listed}


async def test_every_address_of_a_name_is_an_engine(zone: Zone) -> None:
    zone.has("decode.svc", "A", "10.0.0.2", "10.0.0.1", ttl=7)
    zone.has("decode.svc", "AAAA", "fd00::1", "fd00::2")
    report, pause = await source(zone).look()
    assert addresses(report) == {"10.0.0.1:8200", "10.0.0.2:8200"}, "both families are one engine"
    assert (report.problem, pause) == ("", 7)
    zone.records.pop(("decode.svc", "A"))
    report, pause = await source(zone).look()
    assert addresses(report) == {"[fd00::1]:8200", "[fd00::2]:8200"}


async def test_a_name_is_completed_from_the_search_list_and_followed_to_what_it_is_called(
    zone: Zone,
) -> None:
    zone.has("short.search.test", "CNAME", "long.test.", ttl=3)
    zone.records["short.search.test", "A"] = ["long.test 60 IN A 10.0.0.1"]
    found = await look_up(zone.resolver(), "short:1")
    assert found.addresses == {Address("10.0.0.1", 1)}
    assert found.ttl == 3, "the least on the way counts"


async def test_services_are_their_targets_at_their_ports(zone: Zone) -> None:
    """As a headless Service of Kubernetes answers: with the addresses, or without."""
    data = ["0 50 8200 a.svc.", "0 50 8300 b.svc.", "10 50 8400 backup.svc."]
    zone.has("_http._tcp.decode.svc", "SRV", *data, ttl=20)
    zone.has("a.svc", "A", "10.0.0.1", ttl=9)
    zone.has("b.svc", "AAAA", "fd00::2")
    report, pause = await source(zone, SERVICE).look()
    assert addresses(report) == {"10.0.0.1:8200", "[fd00::2]:8300"}, "of the first priority"
    assert pause == 9
    zone.additional = ["a.svc 5 IN A 10.0.0.7", "b.svc 5 IN A 10.0.0.8"]
    zone.asked.clear()
    report, pause = await source(zone, SERVICE).look()
    assert addresses(report) == {"10.0.0.7:8200", "10.0.0.8:8300"}
    assert [kind for _, kind, _ in zone.asked] == ["SRV"]
    assert pause == 5


async def test_a_missing_target_is_left_out_and_queried_again_soon(zone: Zone) -> None:
    zone.has("_http._tcp.decode.svc", "SRV", "0 0 1 a.svc.", "0 0 1 gone.svc.", "0 0 1 .")
    zone.has("a.svc", "A", "10.0.0.1")
    report, pause = await source(zone, SERVICE).look()
    assert (addresses(report), pause) == ({"10.0.0.1:1"}, EMPTY_TTL_S)


async def test_hundreds_of_addresses_come_over_tcp(zone: Zone) -> None:
    zone.has("decode.svc", "A", *[f"10.0.{n // 250}.{n % 250}" for n in range(1000)])
    report, _ = await source(zone).look()
    assert len(addresses(report)) == 1000
    assert [way for _, _, way in zone.asked] == ["udp", "tcp"]


@pytest.mark.parametrize(("ttl", "pause"), [(0, MIN_TTL_S), (600_000, MAX_TTL_S), (15, 15)])
async def test_a_ttl_within_bounds_is_the_query_interval(
    zone: Zone, ttl: int, pause: float
) -> None:
    zone.has("decode.svc", "A", "10.0.0.1", ttl=ttl)
    assert (await source(zone).look())[1] == pause


@pytest.mark.slow
@pytest.mark.parametrize("how", ["servfail", "refused", "mute", "garbage", "away"])
async def test_a_failing_resolver_removes_no_engines(zone: Zone, how: str) -> None:
    zone.has("decode.svc", "A", "10.0.0.1")
    asking = source(zone)
    before, _ = await asking.look()
    assert addresses(before) == {"10.0.0.1:8200"}
    zone.code = {"servfail": dns.rcode.SERVFAIL, "refused": dns.rcode.REFUSED}.get(
        how, dns.rcode.NOERROR
    )
    zone.is_mute, zone.garbage = how == "mute", b"\xff" * 30 if how == "garbage" else b""
    port = zone.port
    if how == "away":
        zone.port = 9  # nobody listens there
    pauses = []
    for _ in range(2 if how in ("mute", "garbage", "away") else 4):
        report, pause = await asking.look()
        assert report.listed is None
        assert report.problem
        assert "\n" not in report.problem
        pauses.append(pause)
    assert pauses == sorted(set(pauses)), "longer and longer"
    zone.code, zone.is_mute, zone.garbage, zone.port = dns.rcode.NOERROR, False, b"", port
    assert (await asking.look())[0] == before
    zone.code = dns.rcode.SERVFAIL
    assert (await asking.look())[1] == pauses[0], "as after the first failure"


@pytest.mark.parametrize("how", ["NXDOMAIN", "no record"])
async def test_the_third_empty_answer_in_a_row_counts(zone: Zone, how: str) -> None:
    zone.has("decode.svc", "A", "10.0.0.1")
    asking = source(zone)
    first, _ = await asking.look()
    records = dict(zone.records)

    async def vanish() -> None:
        zone.records.clear()
        zone.names -= {"decode.svc"} if how == "NXDOMAIN" else set()
        for number in (1, 2):
            report, pause = await asking.look()
            assert (report.listed, pause) == (None, 0.01)
            assert f"{number} of 3" in report.problem

    await vanish()
    zone.code = dns.rcode.SERVFAIL
    assert (await asking.look())[0].listed is None
    zone.code = dns.rcode.NOERROR
    await vanish()  # from the beginning: who cannot tell confirms nothing
    zone.records, zone.names = dict(records), {"decode.svc"}
    assert (await asking.look())[0] == first
    await vanish()
    problem = "decode.svc:8200 does not exist in DNS, or has no addresses"
    assert (await asking.look())[0] == SourceReport((), problem)
    assert (await asking.look())[0] == SourceReport((), problem), "nothing more to doubt"


async def test_a_first_empty_answer_needs_no_confirmation(zone: Zone) -> None:
    report, pause = await source(zone).look()
    assert (report.listed, pause) == ((), EMPTY_TTL_S)
    assert "does not exist in DNS" in report.problem


async def test_all_queries_of_a_look_have_one_deadline(
    zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many targets, each of which would be in time by itself."""
    monkeypatch.setattr(dns_module, "LOOKUP_TIMEOUT_S", 0.3)
    zone.has("_http._tcp.decode.svc", "SRV", *[f"0 0 1 t{n}.svc." for n in range(200)])
    zone.is_mute, zone.failing = True, ("A",)
    report, _ = await asyncio.wait_for(source(zone, SERVICE).look(), 3)
    assert report == SourceReport(None, "no answer within 0.3 s")


async def test_answers_are_parsed_outside_of_the_main_loop(zone: Zone) -> None:
    zone.has("decode.svc", "A", "10.0.0.1")
    threads = []

    def make() -> dns.asyncresolver.Resolver:
        threads.append(threading.current_thread())
        return zone.resolver()

    await DnsSource(EngineRole.DECODE, NAME, make).look()
    assert threads != [threading.current_thread()]


async def test_a_waiting_look_can_be_cancelled(zone: Zone) -> None:
    """A silent resolver holds up no router that is told to end."""
    zone.is_mute = True
    looking = asyncio.create_task(source(zone).look())
    await eventually(lambda: zone.asked)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(looking, 5)
    await eventually(lambda: not [t for t in threading.enumerate() if t.name == "aside"])


async def test_each_look_uses_a_new_resolver(zone: Zone) -> None:
    zone.has("decode.svc", "A", "10.0.0.1")
    made = []

    def make() -> object:
        made.append(1)
        if len(made) == 2:
            raise OSError("no /etc/resolv.conf")
        return zone.resolver()

    asking = DnsSource(EngineRole.DECODE, NAME, make, 0.0, random_share=lambda: -0.98)  # type: ignore[arg-type]
    reports = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dns_module, "MIN_TTL_S", 0.01)
        patch.setattr(dns_module, "MAX_TTL_S", 0.01)
        async with contextlib.aclosing(asking.watch()) as words:
            for _ in range(3):
                reports.append(await asyncio.wait_for(anext(words), 5))
    assert [report.problem for report in reports] == ["", "OSError: no /etc/resolv.conf", ""]
    assert reports[0] == reports[2]


@pytest.mark.parametrize("name", [NAME, SERVICE])
async def test_a_name_may_be_of_engines_over_tls(zone: Zone, name: str) -> None:
    zone.has("decode.svc", "A", "10.0.0.1")
    zone.has("_http._tcp.decode.svc", "SRV", "0 50 8200 decode.svc.")
    for asked, tls in ((name, False), (f"https://{name}", True)):
        report, _ = await source(zone, asked).look()
        assert report.listed is not None
        assert [listed.tls for listed in report.listed] == [tls]
        assert addresses(report) == {"10.0.0.1:8200"}
