"""The command line: `cli.main` runs one command and returns its exit code.

`cli` serves by default and imports the module of any other command only if it runs: `drain`, `key`,
`status`, `bench` and `demo`. They share `console` (argument parser, output) and `router_client`.
"""
