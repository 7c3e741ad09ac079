"""Speed by the strict contract: three windows, and checks that it can be believed."""
