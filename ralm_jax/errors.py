"""What goes wrong in a way that the user can mend: one line that names the thing and what to do."""


class RalmError(Exception):
    """Something failed: a corrupt file, a mismatch, a full disk. The command line exits with 1."""

    exit_code = 1


class UsageError(RalmError):
    """The request itself cannot be met: a missing path, a folder in the way, an impossible size. Exit code 2."""

    exit_code = 2
