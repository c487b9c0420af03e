"""disagg-router key: makes an API key, shows it once, and the line of the file for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from router.auth.api_keys import file_entry, new_key
from router.commands.arguments import Parser
from router.commands.output import unwritable

PROGRAM = "disagg-router key"
DESCRIPTION = """\
Makes an API key for a client of the router. The key goes to standard error and is shown this once;
the line for --api-keys-file goes to standard output, and has only the key's digest:

  disagg-router key team-a >> keys.yaml      (a new file begins with a line of "keys:")

Limits and models are written behind it by hand, as in
  - {name: team-a, sha256: ..., requests_per_minute: 600, tokens_per_minute: 100000,
     concurrency: 20, models: [llama]}
"""


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="Whose it is: in logs and metrics.")
    parser.add_argument(
        "--tenant", metavar="NAME", help="Keys of one tenant share conversations (default: NAME)."
    )
    given = parser.parse_args(argv)
    key = new_key()
    try:
        line = file_entry(given.name, given.tenant, key)
    except ValueError as error:
        parser.error(str(error))
    try:
        print(line, flush=True)
        print(f"API key of {given.name}, shown only now: {key}", file=sys.stderr, flush=True)
    except OSError as error:
        return unwritable(PROGRAM, error)
    return 0
