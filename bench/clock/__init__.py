"""What the machine is and does, and where the time of a step goes."""
