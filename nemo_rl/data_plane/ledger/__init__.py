"""The ledger: a pure state machine, its hosts, and the log of its events."""
