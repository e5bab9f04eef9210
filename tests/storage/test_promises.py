"""What a gather promises of its output, in a folder and in each store: absent, old or complete, and never another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import xrank
from tests.storage.outputs import QUICK, Output, open_output
from tests.storage.written import leave_states, read_folder, read_model

FILE_NBYTES = "8KB"
"""Every tensor is a file, two of them of two parts and a rest."""
POINTS = 175
"""More requests than a gather sends: kills after the last one find it done."""
OVERWRITE_POINTS = 60
Model = dict[str, bytes]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The states of two models of the same kind: an old and a new one."""
    folder = tmp_path_factory.mktemp("promises")
    return leave_states(folder / "old", rows=700, vectors=19), leave_states(
        folder / "new", seed=1, rows=700, vectors=19
    )


@pytest.fixture(scope="module")
def expected(states: tuple[Path, Path]) -> Model:
    xrank.gather_checkpoint(states[0], states[0].parent / "model", max_shard_size=FILE_NBYTES)
    return read_folder(states[0].parent / "model")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    soak = metafunc.config.getoption("soak")
    places = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("gs", "az"))) for kind in QUICK]
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", (*QUICK, "moto", "azurite") if soak else places)
    if "point" in metafunc.fixturenames:
        last = OVERWRITE_POINTS if "overwrite" in metafunc.function.__name__ else POINTS
        points = [(n, when) for n in range(1, last) for when in ("before", "after")]
        metafunc.parametrize(("point", "when"), points if soak else [(last // 2, "after")])


@pytest.fixture
def output(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Output]:
    with open_output(kind, request, tmp_path) as made:
        yield made


def read_seen(output: Output) -> Model | None:
    """Return what a reader finds who follows the index."""
    return read_model({f"one/{name}": data for name, data in output.read().items()}, "one")


def command(source: Path, output: Output, *options: str) -> tuple[object, ...]:
    return ("gather", source, "--out", output.url, "--max-shard-size", FILE_NBYTES, *options)


def test_killed_at_any_moment(
    states: tuple[Path, Path], expected: Model, output: Output, point: int, when: str
) -> None:
    assert output.run_killed(point, when, *command(states[0], output)) in (-9, 0)
    assert read_seen(output) in (None, expected)
    code, text = output.run_on(*command(states[0], output))
    assert code == 0, text
    assert (output.read(), output.list_rest()) == (expected, [])


def test_overwrite_killed_at_any_moment(
    states: tuple[Path, Path], expected: Model, output: Output, point: int, when: str
) -> None:
    for name, data in expected.items():
        output.put(name, data)
    replace = command(states[1], output, "--overwrite")
    assert output.run_killed(point, when, *replace) in (-9, 0)
    seen = read_seen(output)
    code, text = output.run_on(*replace)
    assert code == 0, text
    new = read_seen(output)
    assert new is not None
    assert new.keys() & {"config.json"} and new != expected and output.list_rest() == []
    assert seen is not None
    weights = {name: data for name, data in seen.items() if name.endswith(".safetensors")}
    assert weights.items() <= expected.items() or len({*weights.values()} - {*new.values()}) == 0
    with output.start("verify", output.url) as child:
        told = "".join(child.communicate(timeout=120))
    assert child.returncode == 0, told


def test_cleans_after_a_kill(states: tuple[Path, Path], expected: Model, output: Output, kind: str) -> None:
    assert output.run_killed(60, "after", *command(states[0], output)) == -9
    assert output.list_rest()
    with output.start("clean", output.url if kind != "folder" else Path(output.url).parent) as child:
        told = "".join(child.communicate(timeout=120))
    assert child.returncode == 0, told
    assert (output.read(), output.list_rest()) == ({}, [])


def test_one_of_two_wins(states: tuple[Path, Path], expected: Model, output: Output) -> None:
    children = [output.start(*command(states[0], output)) for _ in range(2)]
    texts = ["".join(child.communicate(timeout=120)) for child in children]
    # The second is refused, or finds the first one's output whole.
    assert sorted(child.returncode for child in children) in ([0, 2], [0, 0]), texts
    assert (output.read(), output.list_rest()) == (expected, [])


def test_replaces_nothing_unasked(states: tuple[Path, Path], output: Output) -> None:
    output.put("notes.txt", b"a user's")
    for options in ((), ("--overwrite",)):
        code, text = output.run_on(*command(states[0], output, *options))
        assert code == 2, text
    assert (output.read(), output.list_rest()) == ({"notes.txt": b"a user's"}, [])
