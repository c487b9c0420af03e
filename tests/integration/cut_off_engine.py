"""A reference engine that cannot reach the side channels whose ports are in a file, one a line.

Run as `python -m tests.integration.cut_off_engine --cut-off FILE`, with the options of
`disagg-engine`. A firewall between two hosts does this; here both engines are on one.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from engine_ext.reference import cli
from engine_ext.wire.dialer import HandshakeClient, PeerRank, TcpDialer

CLOSED_PORT = 1


def cut_off(ports: Path) -> None:
    """From now on, in this process; the file is read for each dial."""
    connect = TcpDialer.connect

    def connect_elsewhere(self: TcpDialer, address: str, peer: PeerRank) -> HandshakeClient:
        if str(peer.address.port) in ports.read_text().split():
            peer = peer._replace(address=peer.address._replace(port=CLOSED_PORT))
        return connect(self, address, peer)

    TcpDialer.connect = connect_elsewhere  # type: ignore[method-assign] # the planted fault


def run_engine(option: str, plant: Callable[[Path], None]) -> NoReturn:
    """Run a reference engine with the fault that `plant` makes of the option's file."""
    at = sys.argv.index(option)
    plant(Path(sys.argv[at + 1]))
    del sys.argv[at : at + 2]
    sys.exit(cli.main())


if __name__ == "__main__":
    run_engine("--cut-off", cut_off)
