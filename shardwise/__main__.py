"""Run the command `shardwise` by `python -m shardwise`."""

from shardwise.cli.main import main

main()
