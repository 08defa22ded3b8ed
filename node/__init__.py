"""A community machine: lease → rollouts → signed traces."""
