"""Many replicas behind a router, simulated from what one was measured to do."""
