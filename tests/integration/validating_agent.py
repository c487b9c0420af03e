"""An engine's agent and validator, in a process of their own: `python -m ... SEED NUMBER`.

Each flipped byte of an honest agent's metadata, and so many random changes, are said hello with,
each under a name of its own; what is accepted is loaded and sent a message. Prints the counts.
"""

import itertools
import sys
import time

import numpy as np

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import ConnectorStats, Region
from engine_ext.wire.notifications import Gone
from engine_ext.worker.agent import NixlAgent
from engine_ext.worker.reply_channels import ReplyChannels
from engine_ext.worker.validator import open_validator
from tests.integration.malformed import Honest, changed, flipped, renamed


def main(seed: str, number: str) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    stats = ConnectorStats()
    agent = NixlAgent([Region("none", memory.ctypes.data, 1024, 1024, 4)], ["UCX"], 0, stats)
    validator = open_validator(agent, ConnectorConfig(engine_id="e"), stats)
    readers = ReplyChannels(agent, 1e6, lambda name: False, validator)
    honest = Honest("honest")
    cases = [
        *flipped(honest.metadata),
        *itertools.islice(changed(honest.metadata, int(seed)), int(number)),
        honest.metadata,
    ]
    for index, metadata in enumerate(cases):
        name = f"stranger {index}"
        readers.hello(name, renamed(metadata, name), time.monotonic())
        readers.answer(name, Gone(("r",)))
        while validator.num_pending:
            honest.agent.get_new_notifs()
            agent.notifications()
            validator.step(time.monotonic())
            readers.step(time.monotonic())
            time.sleep(0.0002)
    is_honest_known = readers.knows(f"stranger {len(cases) - 1}")
    validator.close()
    print(
        len(cases),
        stats.metadata_accepted,
        stats.metadata_refused,
        stats.validators_lost,
        is_honest_known,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
