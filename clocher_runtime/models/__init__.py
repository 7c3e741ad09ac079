"""From a config.json to a ModelSpec (families), to a Plan (build), with weights (load)."""
