"""A process that writes pairs of rows to a ledger until it is killed; started by test_ledger.py.

Prints a line after each transaction that has committed.
"""

import sys
from pathlib import Path

from trainer.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]))
number = 0
while True:
    with ledger.write():
        ledger.add_event(number, "first", "x" * 2_000)
        ledger.add_event(number, "second", "y" * 2_000)
    print(number, flush=True)
    number += 1
