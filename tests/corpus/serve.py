"""Runs xrank's commands in children of one process that has imported it: on a busy machine imports take most time.

Started as ``serve.py WORDS...``, a command whose modules are imported for all; then each line of stdin is a JSON list,
the words of a command and the files for its stdout and stderr, and is answered by its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from xrank.cli.main import main as run_xrank


def import_modules(words: list[str]) -> None:
    """Import what a command does; it runs in a child, so that nothing else of it stays."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        try:
            run_child(words, os.devnull, os.devnull)
        finally:
            os.write(writing, " ".join(sys.modules).encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as names:
        for name in names.read().split():
            if name.startswith("xrank."):
                importlib.import_module(name)
    os.wait()


def run_child(words: list[str], out: str, err: str) -> None:
    """Run a command with its output in files."""
    for number, path in enumerate((os.devnull, out, err)):
        flags = os.O_RDWR if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, flags, 0o644), number)
    sys.argv = ["xrank", *words]
    run_xrank()


def main() -> None:
    """Serve commands until stdin ends."""
    import_modules(sys.argv[1:])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_child(*json.loads(line))
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
