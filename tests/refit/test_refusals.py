"""Refusals by name: other trainers, steps out of order, changed models, wrong tokens, foreign registrations."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import xrank
from tests.refit.jobs import SIZES, FusedEngine, whole_tensors
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    LayoutError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
)
from xrank.refit.directory import find_trainer_ranks
from xrank.refit.peers import PeerRank, check_phase
from xrank.refit.publish import WeightsOffer
from xrank.refit.receive import TakenWeights
from xrank.refit.recording import record_loader

pytestmark = pytest.mark.timeout(120)


def weight(value: float = 1.0, *shape: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full(shape or (8, 8), value)}


@contextmanager
def both(folder: Path, held: Any, target: Any, **options: Any) -> Iterator[tuple[WeightsOffer, TakenWeights]]:
    """Be a trainer that makes snapshots and an engine."""
    with (
        xrank.offer_weights(held, folder, snapshot=True) as offer,
        xrank.take_weights(target, folder, **options) as taken,
    ):
        yield offer, taken


def test_a_second_trainer_at_an_address_is_refused(tmp_path: Path) -> None:
    with xrank.offer_weights(weight(), tmp_path, snapshot=True), pytest.raises(UsageError, match="a different trainer"):
        xrank.offer_weights(weight(), tmp_path)
    xrank.offer_weights(weight(), tmp_path).close()  # the first one has closed


def test_a_trainer_whose_registration_was_replaced_publishes_nothing(tmp_path: Path) -> None:
    with xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer:
        registration = json.loads((tmp_path / "trainer.json").read_text())
        (tmp_path / "trainer.json").write_text(json.dumps({**registration, "id": "of another trainer"}))
        with pytest.raises(ContradictionError, match="replaced this offer"):
            offer.publish(1)
    assert (tmp_path / "trainer.json").exists()  # the other one's


@pytest.mark.parametrize("step", [3, 2, -1, True, 1.5])
def test_a_step_out_of_order_is_refused_and_the_next_one_goes_on(tmp_path: Path, step: Any) -> None:
    with xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer:
        offer.publish(3)
        with pytest.raises(UsageError, match="out of order"):
            offer.publish(step)
        offer.publish(4)


def test_a_step_that_is_past_is_refused(tmp_path: Path) -> None:
    with both(tmp_path, weight(), weight()) as (offer, taken):
        offer.publish(3)
        with pytest.raises(UsageError, match="step 2 is past"):
            taken.update(2, timeout_seconds=5)
        assert taken.update(3, timeout_seconds=5).step == 3
        with pytest.raises(RankTimeoutError, match="a new step did not arrive"):
            taken.update(timeout_seconds=0.1)
        assert taken.step == 3  # nothing was written


def replaced(held: dict[str, torch.Tensor]) -> None:
    held["weight"] = torch.ones(9, 8)


def moved(held: dict[str, torch.Tensor]) -> None:
    held["weight"] = held["weight"].clone()


def removed(held: dict[str, torch.Tensor]) -> None:
    del held["weight"]


@pytest.mark.parametrize("change", [replaced, moved, removed])
def test_a_model_that_changed_its_tensors_is_refused(tmp_path: Path, change: Any) -> None:
    held = {**weight(), "bias": torch.ones(8)}
    with xrank.offer_weights(held, tmp_path) as offer, xrank.take_weights({"bias": torch.zeros(8)}, tmp_path) as taken:
        change(held)
        with pytest.raises(ContradictionError, match="weight is not the tensor that was offered"):
            offer.publish(1)
        with pytest.raises(RankFailedError, match="rank 0 failed: ContradictionError: weight is not the tensor"):
            taken.update(timeout_seconds=5)
        assert taken.step is None


def test_a_change_in_place_while_a_step_is_visible_is_found_on_both_sides(tmp_path: Path) -> None:
    held, target = weight(), weight(0.0)
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            offer.publish(1, timeout_seconds=30)
        except BaseException as error:
            errors.append(error)

    with xrank.offer_weights(held, tmp_path) as offer, xrank.take_weights(target, tmp_path) as taken:
        thread = threading.Thread(target=publish)
        thread.start()
        while offer._block.value.checks < 3:
            time.sleep(0.001)
        held["weight"].add_(1)
        thread.join()
        assert isinstance(errors[0], ContradictionError) and "changed in place" in str(errors[0])
        with pytest.raises(RankFailedError, match="changed in place"):
            taken.update(timeout_seconds=5)
        thread = threading.Thread(target=lambda: offer.publish(2, timeout_seconds=30))
        thread.start()
        assert taken.update(timeout_seconds=30).step == 2
        thread.join()
    assert target["weight"].equal(held["weight"]) and (target["weight"] == 2).all()


def test_a_trainer_that_closes_after_an_engine_has_failed_says_why(tmp_path: Path) -> None:
    bad = {"weight": torch.zeros(9, 8)}
    with (
        xrank.offer_weights(weight(), tmp_path, on_engine_failure="raise") as offer,
        xrank.take_weights(bad, tmp_path) as failing,
    ):
        with pytest.raises(UsageError):
            failing.update(timeout_seconds=5)
        with xrank.take_weights(weight(0.0), tmp_path) as waiting, ThreadPoolExecutor(1) as pool:
            published = pool.submit(offer.publish, 1, timeout_seconds=30)
            waiting.update(timeout_seconds=30)
            with pytest.raises(RankFailedError, match=r"engine rank 0 .* failed"):
                published.result()
        [(rank, description)] = find_trainer_ranks(offer._registration)
        peer = PeerRank(f"trainer rank {rank}", rank, description)
        offer.close()
        wanted = r"trainer rank 0 failed: it has closed its side after RankFailedError: engine rank 0 .* failed"
        with pytest.raises(RankFailedError, match=wanted):
            check_phase(peer, offer._block.value)
        peer.close()


def test_an_engine_gets_new_tensors_and_plans_anew(tmp_path: Path) -> None:
    target = weight(0.0)
    with both(tmp_path, weight(), target) as (offer, taken):
        offer.publish(1)
        taken.update(timeout_seconds=5)
        target["weight"] = torch.zeros(8, 8)
        offer.publish(2)
        assert taken.update(timeout_seconds=5).plan_seconds > 0
        assert (target["weight"] == 1).all()


def test_a_restarted_trainer_is_found_by_the_same_engine(tmp_path: Path) -> None:
    target = weight(0.0)
    with xrank.take_weights(target, tmp_path) as taken:
        for value in (1.0, 2.0):
            with xrank.offer_weights(weight(value), tmp_path, snapshot=True) as offer:
                offer.publish(1)
                assert taken.update(timeout_seconds=5).step == 1
                assert (target["weight"] == value).all()
        with pytest.raises(IncompleteError, match="no trainer offers"):
            taken.update(timeout_seconds=0.1)


@pytest.mark.parametrize("number", range(3))
def test_no_trainer_and_damaged_or_foreign_registrations_are_named(tmp_path: Path, number: int) -> None:
    with xrank.take_weights(weight(), tmp_path) as taken:
        if number == 0:
            with pytest.raises(IncompleteError, match="no trainer offers"):
                taken.update(timeout_seconds=0.1)
            return
        with xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer:
            offer.publish(1)
            path = tmp_path / "trainer.json"
            if number == 1:
                path.write_text("{")
                with pytest.raises(CorruptError, match="is not a registration"):
                    taken.update(timeout_seconds=5)
            elif os.geteuid() == 0:
                os.chown(path, 12_345, -1)
                with pytest.raises(UsageError, match="belongs to a different user"):
                    taken.update(timeout_seconds=5)


def _change_model(registration: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    part = registration["parts"][0]
    model = json.loads(part["model"])
    change(model)
    part["model"] = json.dumps(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda registration: "[" * 100_000,
        lambda registration: b'{"\xff": 1}',
        lambda registration: registration.update(ranks=[], parts=[]),
        lambda registration: registration.update(config=["x"]),
        lambda registration: registration["parts"][0]["offer"].update(pid=2**64),
        lambda registration: registration["parts"][0]["offer"].update(views=[]),
        lambda registration: registration["parts"][0]["offer"].update(socket="x" * 5000),
        lambda registration: registration["parts"][0]["own"].update(unsaved=3),
        lambda registration: registration["parts"][0].update(model="\ufeff{}"),
        lambda registration: _change_model(registration, lambda model: model.update(record=0)),
        lambda registration: _change_model(
            registration, lambda model: model["tensors"].update(weight=["float32", [2**64], 0])
        ),
        lambda registration: _change_model(registration, lambda model: model.pop("aliases")),
    ],
    ids=range(12),
)
def test_registrations_of_another_structure_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], str | bytes | None]
) -> None:
    with (
        xrank.take_weights(weight(), tmp_path) as taken,
        xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer,
    ):
        offer.publish(1)
        path = tmp_path / "trainer.json"
        registration = json.loads(path.read_text())
        content = change(registration) or json.dumps(registration)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(CorruptError) as caught:
            taken.update(timeout_seconds=5)
        assert caught.value.got and caught.value.next_step


@pytest.mark.parametrize("what", ["token", "sign"])
def test_a_wrong_token_and_another_process_are_refused(tmp_path: Path, what: str) -> None:
    """The engine must use sockets for the first: the kernel's reads need no token."""
    with both(tmp_path, weight(), weight()) as (offer, taken):
        offer.publish(1)
        registration = json.loads((tmp_path / "trainer.json").read_text())
        lent = registration["parts"][0]["offer"]
        if what == "token":
            lent |= {"space": "another host", "token": "00" * (len(lent["token"]) // 2)}
        else:
            # Another process has the number by now, and nothing listens any more.
            lent |= {"nonce": "11" * 16, "socket": "xrank-gone", "port": None}
        (tmp_path / "trainer.json").write_text(json.dumps(registration))
        with pytest.raises((IncompleteError, RankFailedError), match="trainer"):
            taken.update(timeout_seconds=0.5)
        assert taken.step is None


def test_an_engine_of_another_host_takes_over_sockets(tmp_path: Path) -> None:
    target = {"weight": torch.zeros(300, 300), "half": torch.zeros(300, dtype=torch.bfloat16)}
    held = {"weight": torch.randn(300, 300), "half": torch.randn(300)}
    with both(tmp_path, held, target) as (offer, taken):
        offer.publish(1)
        registration = json.loads((tmp_path / "trainer.json").read_text())
        registration["parts"][0]["offer"]["space"] = "another host"
        (tmp_path / "trainer.json").write_text(json.dumps(registration))
        report = taken.update(timeout_seconds=10)
    assert report.direct_nbytes == 0 and report.moved_nbytes == 300 * 300 * 4 + 300 * 4
    assert target["weight"].equal(held["weight"]) and target["half"].equal(held["half"].bfloat16())


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        ({"weight": torch.zeros(8, 9)}, UsageError, "shape"),
        ({"other": torch.zeros(8)}, UsageError, "the trainer has no such tensor"),
        ({"weight": torch.zeros(8, 8, dtype=torch.int64)}, UsageError, "cannot be converted to"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_before_a_tensor_changes(
    tmp_path: Path, target: Any, error: Any, match: str
) -> None:
    with both(tmp_path, weight(), target) as (offer, taken):
        offer.publish(1)
        with pytest.raises(error, match=match):
            taken.update(timeout_seconds=5)
        assert all((tensor == 0).all() for tensor in target.values())


def test_arguments_are_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises((UsageError, LayoutError)):
        xrank.take_weights(module, tmp_path, loader=print, mesh=xrank_mesh())
    with pytest.raises(UsageError, match="meta"):
        xrank.take_weights(torch.nn.Linear(2, 2, device="meta"), tmp_path)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o777)
    open_to_all.chmod(0o777)
    with pytest.raises(UsageError, match="other users"):
        xrank.offer_weights(module, open_to_all)


def xrank_mesh() -> Any:
    from xrank.layout import DeviceMesh

    return DeviceMesh((1,), ("tp",))


SHAPES = {name: ("BF16", tuple(tensor.shape)) for name, tensor in whole_tensors(1).items()}


def test_a_recording_has_one_copy_for_each_tensor_and_writes_nothing() -> None:
    engine = FusedEngine(SIZES, 1, 2)
    recording = record_loader(engine.load_weights, list(engine.named_parameters()), SHAPES)
    assert not recording.whole and len(recording.copies) == len(SHAPES)
    assert {fill.target.shape for fill in recording.fills} == {(13, 64)}  # 99 rows of 2 x 56
    assert all((parameter == 0).all() for parameter in engine.parameters())


class Odd(torch.nn.Module):
    """A loader that changes some tensors on their way: by a factor, by a read, and one that needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Parameter(torch.zeros(4, 6))
        self.scaled = torch.nn.Parameter(torch.zeros(6, 4))
        self.mixed = torch.nn.Parameter(torch.zeros(2, 8))
        self.read = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            if name == "plain":
                self.plain.data.copy_(loaded.t().contiguous()[:, :6])
            elif name == "scaled":
                self.scaled.data.copy_(loaded * 2)
            elif name in ("left", "right"):
                part = self.mixed.data[:, :4] if name == "left" else self.mixed.data[:, 4:]
                part.copy_(loaded + 1 if name == "left" else loaded)
            elif name == "read":
                assert loaded.sum().item() > -1e9
                self.read.data.copy_(loaded)


def test_what_a_loader_changes_is_taken_whole_by_name(tmp_path: Path) -> None:
    held = {
        "plain": torch.randn(6, 4),
        "scaled": torch.randn(6, 4),
        "left": torch.randn(2, 4),
        "right": torch.randn(2, 4),
        "read": torch.randn(3),
        "unused": torch.randn(5),
    }
    engine, wanted = Odd(), Odd()
    wanted.load_weights(held.items())
    with both(tmp_path, held, engine, loader=engine.load_weights) as (offer, taken):
        offer.publish(1)
        report = taken.update(timeout_seconds=10)
    assert report.whole == {"scaled": 96, "left": 32, "right": 32, "read": 12} and report.unused == ("unused",)
    assert all(a.equal(b) for a, b in zip(engine.parameters(), wanted.parameters(), strict=True))


def twice(module: Odd, loaded: torch.Tensor) -> None:
    module.plain.data.copy_(loaded.t())
    module.plain.data[0].copy_(loaded.t()[0])


def partly(module: Odd, loaded: torch.Tensor) -> None:
    module.plain.data[1:].copy_(loaded.t()[1:])


def cleared_after(module: Odd, loaded: torch.Tensor) -> None:
    module.plain.data.copy_(loaded.t())
    module.plain.data.zero_()


def cleared_in_part_after(module: Odd, loaded: torch.Tensor) -> None:
    module.plain.data.zero_()
    module.plain.data.copy_(loaded.t())
    module.plain.data[0].zero_()


@pytest.mark.parametrize(
    ("load", "match"),
    [
        (twice, "writes twice"),
        (partly, "never writes"),
        (cleared_after, "writes twice"),
        (cleared_in_part_after, "writes twice"),
    ],
)
def test_a_loader_that_leaves_a_parameter_unproven_is_refused(load: Any, match: str) -> None:
    module = Odd()

    def load_weights(weights: Any) -> None:
        for _, loaded in weights:
            load(module, loaded)

    with pytest.raises(UsageError, match=f"plain.*{match}"):
        record_loader(load_weights, [("plain", module.plain)], {"plain": ("F32", (6, 4))})


def test_a_loader_that_replaces_a_parameter_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 2, bias=False)

    def load_weights(weights: Any) -> None:
        for _, loaded in weights:
            module.weight = torch.nn.Parameter(loaded)

    with both(tmp_path, weight(1.0, 2, 4), module, loader=load_weights) as (offer, taken):
        offer.publish(1)
        with pytest.raises(UsageError, match="weight: the loader replaces"):
            taken.update(timeout_seconds=5)
