"""Programs that are not tests: lists for the type checker, checkpoints and reviews."""
