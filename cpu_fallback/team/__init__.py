"""Threads that execute a tape together: tape, barrier, placement, pace, memory near them."""
