"""The command line: `cli.main` runs one command and returns its exit code.

`cli` serves by default, and imports the module of another command (`COMMANDS`) only if it runs.
They share `console` (argument parser, output) and `router_client`.
"""
