"""Token ids in, token ids out: loading, sessions, back ends, timing."""
