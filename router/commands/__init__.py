"""The command line: `disagg-router` and its subcommands."""
