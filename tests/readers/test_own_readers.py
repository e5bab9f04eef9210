"""What is imported for a source is its own reader; what lists the readers agrees with them."""

import subprocess
import sys
from pathlib import Path

from tests.commands.made_workspaces import leave
from xrank.readers.discovery import OWN_READERS

_PROGRAM = """
import sys
from xrank.commands.gather import gather_checkpoint
gather_checkpoint(*sys.argv[1:])
print(sorted(name for name in sys.modules if name.startswith("xrank.readers.")))
"""


def test_listed_names_are_the_readers_own() -> None:
    for listed in OWN_READERS:
        assert listed.load().name == listed.name


def test_a_gather_imports_no_other_formats_reader(tmp_path: Path) -> None:
    leave(tmp_path / "run")
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "xrank.readers.workspace'" in done.stdout
    for other in ("dcp", "deepspeed", "fsdp", "megatron", "hugging_face.bin_folder", "hugging_face.shards'"):
        assert f"xrank.readers.{other}" not in done.stdout, other
