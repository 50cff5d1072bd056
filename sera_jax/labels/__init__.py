"""External labels and the ledger of what they cost."""
