"""disagg-router key: makes an API key and prints it once, with its line for the keys' file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from router.auth.api_keys import file_entry, new_key
from router.commands.console import CommandParser

DESCRIPTION = """\
Makes an API key for a client of the router. The key is printed to standard error, this once. The
line for --api-keys-file is printed to standard output and contains only the key's digest:

  disagg-router key team-a >> keys.yaml

Add limits and models by hand, as in
  - {name: team-a, sha256: ..., requests_per_minute: 600, tokens_per_minute: 100000,
     concurrency: 20, models: [llama]}
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router key", DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="Name of the key in logs and metrics.")
    parser.add_argument(
        "--tenant", metavar="NAME", help="Keys of one tenant share conversations (default: NAME)."
    )
    given = parser.parse_args(argv)
    key = new_key()
    try:
        line = file_entry(given.name, given.tenant, key)
    except ValueError as error:
        parser.error(str(error))

    def show() -> int:
        print(line, flush=True)
        print(f"API key of {given.name}, shown only now: {key}", file=sys.stderr, flush=True)
        return 0

    return parser.run(show)
