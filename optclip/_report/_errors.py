"""The error of a log that cannot be read."""


class LogError(ValueError):
    """Reject a log, with one line that names the place and the fix."""
