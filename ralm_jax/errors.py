"""What goes wrong in a way that the user can mend: one line that names the thing and what to do."""

import re


class RalmError(Exception):
    """Something failed: a corrupt file, a mismatch, a full disk. The command line exits with 1."""

    exit_code = 1


class UsageError(RalmError):
    """The request itself cannot be met: a missing path, a folder in the way, an impossible size. Exit code 2."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """What a library's exception says, without the pages that some append."""
    text = str(error).strip().replace("\0", "")
    return re.split(r"\n| \[\w+=", text)[0] if text else type(error).__name__
