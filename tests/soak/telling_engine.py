"""A reference engine that tells which requests it runs, to whoever forges messages about them.

Run as `python -m tests.soak.telling_engine`, with the options of `disagg-engine`, and with the UDP
port where it is heard in the environment.
"""

import os
import socket
import sys

from engine_ext import connector
from engine_ext.common.types import EngineRequest
from engine_ext.reference import cli
from engine_ext.scheduler.scheduler import SchedulerConnector

EAR = "SOAK_EAR"


class TellingScheduler(SchedulerConnector):
    def on_new_request(self, request: EngineRequest) -> None:
        super().on_new_request(request)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
            mouth.sendto(request.request_id.encode(), ("127.0.0.1", int(os.environ[EAR])))


if __name__ == "__main__":
    connector.SchedulerConnector = TellingScheduler  # type: ignore[misc] # what must not matter
    sys.exit(cli.main())
