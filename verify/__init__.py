"""Is this trace honest? No network, no clock."""
