"""Programs that are not tests: measurements, lists, mutation testing."""
