"""Which clip survives injected spikes best: two small character models, many methods."""
