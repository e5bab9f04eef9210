"""Builds the sources of the corpus, records what a version of xrank does with them, compares two records.

    python -m tests.corpus build /tmp/sources
    python -m tests.corpus record /tmp/sources /tmp/before.json --tree /path/of/another/checkout
    python -m tests.corpus record /tmp/sources /tmp/after.json
    python -m tests.corpus compare /tmp/before.json /tmp/after.json -v

Both take ``--only PATTERN``. An exit code that is corrected on purpose is named in `tests.corpus.compare`.

The sources are built once and read by both versions: the run id of a reshard is made of their inodes and times.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    """Run one of the three commands; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--only", default="", help="regular expression, searched in the names of commands")
    build = commands.add_parser("build", help="make the sources in a new folder")
    build.add_argument("sources", type=Path)
    record = commands.add_parser("record", parents=[chosen], help="run all commands and write what they did")
    record.add_argument("sources", type=Path)
    record.add_argument("record", type=Path)
    record.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="the checkout whose xrank is run")
    record.add_argument("--jobs", type=int, default=2, help="commands at the same time")
    compare = commands.add_parser(
        "compare", parents=[chosen], help="print what differs; exit code 1 if anything but texts does"
    )
    compare.add_argument("records", type=Path, nargs=2)
    compare.add_argument("-v", "--verbose", action="store_true", help="print the texts that differ, too")
    options = parser.parse_args()
    if options.command == "build":
        from tests.corpus.sources import build as build_sources

        build_sources(options.sources.absolute())
    elif options.command == "record":
        from tests.corpus import record as recording

        tree, sources = options.tree.absolute(), options.sources.absolute()
        found = recording.record(sources, tree=tree, only=options.only, jobs=options.jobs)
        options.record.write_text(json.dumps(found, indent=1))
        print(f"{len(found['commands'])} commands in {found['seconds']} s with {found['xrank']}")
    else:
        from tests.corpus import compare as comparing

        records = (json.loads(path.read_text()) for path in options.records)
        differences = comparing.compare(*records, only=options.only)
        return 0 if comparing.report(differences, verbose=options.verbose) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
