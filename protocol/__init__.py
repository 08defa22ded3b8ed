"""What both sides must compute alike: pure values and functions. See SPEC.md."""
