"""Size and structure of the library: lines, modules, floors, names that modules hand over, functions that calls pass.

    make house
    python benchmarks/house.py            counts alone, in a second
    python benchmarks/house.py --walk     also runs a gather, an export and a live gather, and counts their functions,
                                          and compares the start of a command with the imports that it cannot avoid

The counts keep the house small: a change that raises one of them should be worth it.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "xrank"
_IS_NEW_SCOPE = 1  # CO_OPTIMIZED: functions, not modules and classes


class Module:
    """A module's text, syntax and imports."""

    def __init__(self, path: Path) -> None:
        self.name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        self.is_package = path.name == "__init__.py"
        text = path.read_text()
        self.lines = text.splitlines()
        self.nodes = [*ast.walk(ast.parse(text))]

    @property
    def room(self) -> str:
        """Return the package, or module, directly below the library."""
        return ".".join(self.name.split(".")[:2])

    def imports(self, known: Iterable[str]) -> set[tuple[str, str]]:
        """Return (module, name) of all that is taken from other modules of the library, wherever the import stands."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == LIBRARY.name:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add((whole if whole in known else node.module, alias.name))
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name in known}
        return {(module, name) for module, name in found if module != self.name and module in known}

    def error_lines(self) -> set[int]:
        """Return the lines inside ``raise`` statements and calls of errors."""
        rows: set[int] = set()
        for node in self.nodes:
            called = getattr(node, "func", None)
            name = getattr(called, "id", "") or getattr(called, "attr", "")
            if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and name.endswith("Error")):
                rows.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return rows


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of nodes that all reach one another, ground first (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in path:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            start = path.index(node)
            found.append(set(path[start:]))
            del path[start:]

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in order:
            visit(node)
    return found


def count_floors(graph: Mapping[str, set[str]]) -> int:
    """Return the length of the longest chain of imports; a circle is one link."""
    height: dict[str, int] = {}
    for group in circles(graph):
        below = {other for node in group for other in graph.get(node, ())} - group
        floor = 1 + max((height[other] for other in below), default=0)
        height.update(dict.fromkeys(group, floor))
    return max(height.values(), default=0)


def count_house() -> dict[str, str]:
    """Return the counts of the library and of its tests."""
    modules = {module.name: module for module in map(Module, sorted(LIBRARY.rglob("*.py")))}
    imported = {name: module.imports(modules) for name, module in modules.items()}
    graph = {name: {other for other, _ in found} for name, found in imported.items()}
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        rooms[modules[name].room] |= {modules[other].room for other in others} - {modules[name].room}
    sizes = [len(module.lines) for module in modules.values()]
    total = sum(sizes)
    errors = sum(len(module.error_lines()) for module in modules.values())
    comments = sum(bool(re.match(r"\s*#", line)) for module in modules.values() for line in module.lines)
    classes = Counter(
        node.name
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    packages = [path for path in LIBRARY.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    loops = [group for group in circles(graph) if len(group) > 1 and not any(modules[one].is_package for one in group)]
    return {
        "lines of the library": f"{total:,}",
        "modules; median lines of one": f"{len(modules)}; {statistics.median(sizes):.0f}",
        "packages; floors of packages": f"{len(packages)}; {count_floors(rooms)}",
        "names imported between modules": f"{len(set().union(*imported.values())):,}",
        "lines inside raise and Error(...)": f"{100 * errors / total:.1f} %",
        "comment lines": f"{100 * comments / total:.1f} %",
        "import circles": str(len(loops)),
        "class names with two meanings": str(sum(count > 1 for count in classes.values())),
        "lines of tests": f"{sum(len(path.read_text().splitlines()) for path in (ROOT / 'tests').rglob('*.py')):,}",
    }


def count_walk() -> dict[str, str]:
    """Return how many functions of how many modules three calls pass; each call runs in this interpreter."""
    import torch

    from xrank import NFSWorkspace, export_model, get_tensors_parallel
    from xrank.cli.main import cli
    from xrank.layout import DeviceMesh, LayoutMap

    with tempfile.TemporaryDirectory() as folder:
        layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
        layouts["w"], layouts["b"] = "[r/tp, c]", "[h]"
        for rank in range(2):
            states = NFSWorkspace(f"{folder}/states", rank=rank, world_size=2, run_id="a")
            tensors = {"w": torch.ones(2, 4), "b": torch.ones(3)}
            states.write_configs_and_weights({"model_type": "x"}, tensors, layouts=layouts, step=1)
        gather = ["gather", f"{folder}/states", "--out", f"{folder}/model", "--workers", "1", "-q"]
        model = torch.nn.Linear(3, 2)

        def gather_live() -> None:
            with get_tensors_parallel(torch.ones(3), [0]):
                pass

        found = {
            "one gather passes": functions_of(lambda: cli.main(args=gather, standalone_mode=False)),
            "one export_model passes": functions_of(
                lambda: export_model(model, f"{folder}/exported", config_overrides={"model_type": "x"})
            ),
        }
        gather_live()
        return found | {"a warm get_tensors_parallel passes": functions_of(gather_live)}


def measure_start(num_runs: int = 15) -> dict[str, str]:
    """Return how much longer a dry run of 8 ranks' small checkpoint takes than the imports of numpy and click alone."""
    import torch

    from xrank import NFSWorkspace
    from xrank.layout import DeviceMesh, LayoutMap

    with tempfile.TemporaryDirectory() as folder:
        layouts = LayoutMap(DeviceMesh((8,), ("tp",)))
        layouts["w"] = "[r/tp]"
        for rank in range(8):
            states = NFSWorkspace(f"{folder}/ws", rank=rank, world_size=8, run_id="a")
            states.write_configs_and_weights({"model_type": "x"}, {"w": torch.ones(4)}, layouts=layouts, step=1)
        commands = {
            "dry run": ["-m", "xrank", "gather", f"{folder}/ws", "--out", f"{folder}/out", "--dry-run", "-q"],
            "imports": ["-c", "import numpy, click"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(num_runs):
            for name, command in commands.items():
                started = time.perf_counter()
                subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - started)
    run, imports = (statistics.median(seconds[name]) for name in commands)
    return {"a dry run / import numpy, click": f"{run / imports:.2f} ({run:.2f} s, {imports:.2f} s)"}


def functions_of(call: Callable[[], object]) -> str:
    """Return how many functions of the library a call passes, in all its threads."""
    passed: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & _IS_NEW_SCOPE and code.co_filename.startswith(f"{LIBRARY}/"):
            passed.add(code)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    named = {(one.co_filename, one.co_name, one.co_firstlineno) for one in passed if not one.co_name.startswith("<")}
    return f"{len(named)} functions in {len({file for file, _, _ in named})} modules"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--walk", action="store_true", help="run three calls and count the functions that they pass")
    is_walk = parser.parse_args().walk
    sys.path.insert(0, str(ROOT))
    counts = {**count_house(), **(count_walk() | measure_start() if is_walk else {})}
    for name, count in counts.items():
        print(f"{name:<40} {count}")


if __name__ == "__main__":
    main()
