"""Per-token losses, one small file each."""
