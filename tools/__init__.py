"""Programs that are not tests: measurements, pages, and faults put in on purpose."""
