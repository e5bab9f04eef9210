"""What xrank has named in shared memory of this machine: nothing, wherever all goes well."""

import os


def named_memory() -> list[str]:
    """Return the files in /dev/shm that have xrank's name in theirs.

    Other programs come and go there, too: what they put there is called otherwise (rank_0 is ModelOpt's), or is a
    folder, such as somebody's room for a test.
    """
    with os.scandir("/dev/shm") as entries:
        return sorted(entry.name for entry in entries if "xrank" in entry.name and entry.is_file(follow_symlinks=False))
