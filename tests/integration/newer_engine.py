"""A reference engine whose extension has the next version, and is the same in all else.

Run as `python -m tests.integration.newer_engine`, with the options of `disagg-engine`.
"""

import sys

from engine_ext.wire import errors

if __name__ == "__main__":
    errors.EXTENSION_VERSION += 1  # before anybody has read it
    from engine_ext.reference import cli

    sys.exit(cli.main())
