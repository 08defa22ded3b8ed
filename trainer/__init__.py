"""The home cluster: leases, checks, ledger, learner."""
