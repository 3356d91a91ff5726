"""Programs that are not tests: measurements, generated pages, mutation testing."""
