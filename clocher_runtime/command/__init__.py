"""The commands: settings, a run, its one line."""
