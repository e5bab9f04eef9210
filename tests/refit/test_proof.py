"""Engines that prove by digests that they hold a trainer's values, and name what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import xrank
from benchmarks.fused_engine import FusedEngine
from tests.engine.test_value_digests import digest, part_of, whole_of
from tests.refit.jobs import SIZES, engine_of, same, shard, trainer_layouts, wait_for_file, whole_tensors
from tests.refit.test_refusals import weight
from xrank.engine.value_digests import digest_parts, digest_places
from xrank.errors import ContradictionError, UsageError, XrankError
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.stored_model import StoredShard
from xrank.refit.proof import DigestTable, HeldPart, ProofPlan, RankDigests, compare
from xrank.refit.receive import TakenWeights

pytestmark = pytest.mark.timeout(180)


def offer_and_take(folder: Path, held: Any, target: Any, **options: Any) -> tuple[Any, TakenWeights]:
    offer = xrank.offer_weights(held, folder, snapshot=True, proof=True, **options)
    return offer, xrank.take_weights(target, folder, proof=True)


def hexadecimal(tensor: torch.Tensor) -> str:
    return f"{digest(whole_of(tensor)):016x}"


# ---- many ranks: FSDP over tensor parallelism into fused tensor parallelism


def train(folder: str, steps: int, flips: dict[int, str]) -> None:
    """Publish steps; in a step of `flips`, rank 2 changes a byte that it lends after its digest."""
    rank, layouts = dist.get_rank(), trainer_layouts()
    held = shard(1, layouts, rank)
    with xrank.offer_weights(held, folder, layouts=layouts, proof=True) as offer:
        offer.wait_for_takers(2, timeout_seconds=60)
        digest_values = offer._part.digest

        def digest_and_flip(step: int) -> None:
            digest_values(step)
            if step in flips and rank == 2:
                held[flips[step]].data.view(-1).view(torch.uint8)[5] ^= 16

        offer._part.digest = digest_and_flip  # type: ignore[method-assign]
        for step in range(1, steps + 1):
            for name, tensor in shard(step, layouts, rank).items():
                held[name].copy_(tensor)
            offer.publish(step, timeout_seconds=60)
            (Path(folder) / f"published-{step}").touch()
        wait_for_file(Path(folder) / "checked")


def serve(folder: str) -> list[Any]:
    """Take two steps, of which rank 1 changes a weight; return what its check and the third step raise."""
    rank, engine = dist.get_rank(), FusedEngine(SIZES, dist.get_rank(), 2)
    with xrank.take_weights(engine, folder, loader=engine.load_weights, proof=True) as weights:
        for step in (1, 2):
            report = weights.update(timeout_seconds=60)
            assert same(engine, engine_of(step, rank, 2)) and not report.unproven
            assert report.digests == {name: hexadecimal(whole) for name, whole in whole_tensors(step).items()}
            assert weights.check().step == step
        dist.barrier()
        if rank == 1:
            engine.get_parameter("model_layers_1_self_attn_qkv_proj_weight").data[3, 3] += 1
        answers = [catch(weights.check), catch(lambda: weights.update(timeout_seconds=60)), weights.step]
        wait_for_file(Path(folder) / "published-3")  # until then the step could be taken again
        report = weights.update(timeout_seconds=60)
        assert report.step == 4 and same(engine, engine_of(4, rank, 2)) and len(report.digests) == 21
        dist.barrier()
        (Path(folder) / "checked").touch()
    return answers


def catch(call: Any) -> Any:
    try:
        call()
    except XrankError as error:
        return type(error), error.rank, error.tensor, error.index_range, f"{error}, {error.want}"
    return None


def test_fused_ranks_prove_each_step_and_name_ranks_and_rows(run_jobs: Any, tmp_path: Path) -> None:
    bad = "model.layers.0.mlp.gate_proj.weight"
    _, (first, second) = run_jobs((4, train, (str(tmp_path), 4, {3: bad})), (2, serve, (str(tmp_path),)))
    # Rank 1 holds the query rows from 32 on.
    assert first[0] is None
    assert second[0][:4] == (ContradictionError, 1, "model.layers.1.self_attn.q_proj.weight", "rows 35-35")
    # Rank 2 of the trainer has the second quarter of the 96 rows, which are on rank 0 of the engine.
    for kind, rank, tensor, where, text in (first[1], second[1]):
        assert (kind, rank, tensor) == (ContradictionError, 0, bad), text
        assert where == "rows 24-25" and "trainer rank 2" in text, text
    assert first[2] is None and second[2] is None


# ---- one rank on each side


def test_a_quantized_engine_is_compared_with_what_the_quantizer_makes(tmp_path: Path) -> None:
    trained = {"up_proj.weight": torch.randn(300, 200), "norm.weight": torch.ones(200)}
    served = {
        "up_proj.weight": torch.zeros(300, 200, dtype=torch.float8_e4m3fn),
        "up_proj.weight_scale_inv": torch.zeros(3, 2),
        "norm.weight": torch.zeros(200, dtype=torch.bfloat16),
    }
    quantize = xrank.Quantization("fp8", (128, 128))
    offer, weights = offer_and_take(tmp_path, trained, served, dtype="bf16", transform=quantize)
    with offer, weights:
        offer.publish(1)
        made = {**quantize("up_proj.weight", trained["up_proj.weight"]), "norm.weight": torch.ones(200).bfloat16()}
        report = weights.update(timeout_seconds=10)
        assert report.digests == {name: hexadecimal(as_integers(tensor)) for name, tensor in made.items()}
        assert not report.unproven and weights.check().num_tensors == 3
        served["up_proj.weight_scale_inv"].zero_()  # as after a load that left the scales out
        with pytest.raises(ContradictionError, match=r"up_proj.weight_scale_inv: engine rank 0 has different values"):
            weights.check()


def test_a_scheme_for_folders_is_compared_with_what_a_folder_has(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(256, 384).bfloat16(),
        "model.norm.weight": torch.ones(384),
    }
    xrank.export_model(trained, tmp_path / "out", quantize="FP8_BLOCK")
    wanted = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    served = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    offer, weights = offer_and_take(tmp_path / "refit", trained, served, quantize="FP8_BLOCK")
    with offer, weights:
        offer.publish(1)
        report = weights.update(timeout_seconds=10)
        assert len(wanted) > 2 and not report.unproven
        assert report.digests == {name: hexadecimal(as_integers(tensor)) for name, tensor in wanted.items()}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return fp8 as bytes: numpy has no such type."""
    return tensor.view(torch.int8) if tensor.element_size() == 1 else tensor


def test_a_sender_of_wrong_bytes_is_found_and_the_step_is_not_held(tmp_path: Path) -> None:
    held, served = weight(1.0, 640, 512), weight(0.0, 640, 512)
    offer, weights = offer_and_take(tmp_path, held, served)
    with offer, weights:
        offer.publish(1)
        row = offer._part._copies[0].find_row(0, 640 * 512 * 4)
        row[4 * 512 * 100] ^= 1  # after its digest
        with pytest.raises(
            ContradictionError, match="engine rank 0 does not hold the trainer's values in rows 100-109"
        ):
            weights.update(timeout_seconds=10)
        assert weights.step is None
        with pytest.raises(UsageError, match="there are no digests"):
            weights.check()
        offer.publish(2)
        assert list(weights.update(timeout_seconds=10).digests) == ["weight"]


def test_a_replaced_tensor_is_not_the_one_that_was_filled(tmp_path: Path) -> None:
    served = weight(0.0)
    offer, weights = offer_and_take(tmp_path, weight(), served)
    with offer, weights:
        offer.publish(1)
        weights.update(timeout_seconds=10)
        served["weight"] = served["weight"].clone()
        with pytest.raises(ContradictionError, match="weight: engine rank 0 has replaced the tensor"):
            weights.check()


def test_casts_are_named_as_not_compared_and_are_checked_later(tmp_path: Path) -> None:
    served = {"weight": torch.zeros(8, 8, dtype=torch.bfloat16), "bias": torch.zeros(8)}
    offer, weights = offer_and_take(tmp_path, {**weight(), "bias": torch.ones(8)}, served)
    with offer, weights:
        offer.publish(1)
        report = weights.update(timeout_seconds=10)
        assert report.unproven == {"weight": "cast from F32 to BF16"} and list(report.digests) == ["bias"]
        assert "\nproof   1 tensor equal to the trainer's; not compared: weight" in str(report)
        served["weight"][0, 0] = 5
        with pytest.raises(ContradictionError, match="weight: engine rank 0 has different values than after"):
            weights.check()


class DoublingEngine(torch.nn.Linear):
    """An engine whose loader changes one tensor on the way."""

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            self.get_parameter(name).data.copy_(2 * loaded if name == "bias" else loaded)


def test_tensors_that_the_loader_takes_whole_are_named_as_not_compared(tmp_path: Path) -> None:
    engine = DoublingEngine(8, 8)
    held = {**weight(), "bias": torch.ones(8)}
    with (
        xrank.offer_weights(held, tmp_path, snapshot=True, proof=True) as offer,
        xrank.take_weights(engine, tmp_path, loader=engine.load_weights, proof=True) as weights,
    ):
        offer.publish(1)
        report = weights.update(timeout_seconds=10)
        assert report.unproven == {"bias": "the engine's loader gets the whole tensor"} and list(report.digests) == [
            "weight"
        ]


def test_only_the_engine_asks(tmp_path: Path) -> None:
    served = weight(0.0)
    with (
        xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer,
        xrank.take_weights(served, tmp_path, proof=True) as weights,
    ):
        offer.publish(1)
        with pytest.raises(UsageError, match="computes no digests to compare with"):
            weights.update(timeout_seconds=10)
        assert not served["weight"].any()


def test_only_the_trainer_offers(tmp_path: Path) -> None:
    with (
        xrank.offer_weights(weight(), tmp_path, snapshot=True, proof=True) as offer,
        xrank.take_weights(weight(0.0), tmp_path) as weights,
    ):
        offer.publish(1)
        report = weights.update(timeout_seconds=10)
        assert not report.digests and not report.unproven
        with pytest.raises(UsageError, match="there are no digests"):
            weights.check()


def test_a_step_of_another_engine_can_be_checked(tmp_path: Path) -> None:
    served = weight(0.0)
    with (
        xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer,
        xrank.take_weights(weight(0.0), tmp_path, relay=True) as old,
        xrank.take_weights(served, tmp_path, proof=True) as weights,
    ):
        offer.publish(1)
        old.update(timeout_seconds=10)
        report = weights.copy_from_engines(timeout_seconds=10)
        assert report.unproven == {"weight": "taken from another engine"} and weights.check().step == 1
        served["weight"][2] = 3
        with pytest.raises(ContradictionError, match="has different values than after its last update in"):
            weights.check()


# ---- one replica of several


def table_of(rank: int, whole: torch.Tensor, rows: slice) -> RankDigests:
    """Return the table of a rank that holds some rows of the only tensor."""
    part = part_of(whole, (rows, slice(0, whole.shape[1])))
    table = DigestTable()
    table.write((1, 1, 1), [HeldPart(0, "weight", part, digest_places(part))], digest_parts([part], 1))

    def read(start: int, into: Any) -> None:
        into[:] = table.words[start : start + into.size]

    found = RankDigests.read_words(f"engine rank {rank}", rank, read)
    assert found is not None
    return found


@pytest.mark.parametrize("wrong", [None, 1, 2])
def test_replicas_of_a_part_are_all_compared(wrong: int | None) -> None:
    """Ranks 1 and 2 hold the lower half, as key heads are held where there are more ranks than heads."""
    right, nests = torch.arange(32.0).view(8, 4), NestTable.from_nests([Nest(0, 0, ((32, 1, 1),))])
    shard = StoredShard("weight", "F32", (8, 4), int_array([0]), int_array([0]), nests)
    bad = right.clone()
    bad[6, 1] = -1
    engine = [
        table_of(rank, bad if rank == wrong else right, rows)
        for rank, rows in enumerate((slice(0, 4), slice(4, 8), slice(4, 8)))
    ]
    plan, trainer = ProofPlan([shard], [], {}), [table_of(0, right, slice(0, 8))]
    if wrong is None:
        assert compare(plan, trainer, engine).digests == {"weight": hexadecimal(right)}
        assert compare(plan, trainer, engine[:2]).digests and compare(plan, trainer, engine[1:]).unproven
        return
    with pytest.raises(ContradictionError, match=f"engine rank {wrong} does not hold .* in rows 6-6") as raised:
        compare(plan, trainer, engine)
    assert raised.value.rank == wrong


def train_whole(folder: str) -> None:
    with xrank.offer_weights(weight(1.0, 640, 512), folder, proof=True) as offer:
        offer.wait_for_takers(2, timeout_seconds=60)
        for step in (1, 2):
            offer.publish(step, timeout_seconds=60)


def serve_whole(folder: str) -> Any:
    """Take a step twice; rank 1 writes to its replica before it digests it the first time."""
    served = weight(0.0, 640, 512)
    with xrank.take_weights(served, folder, proof=True) as weights:
        finish = weights._target.finish

        def finish_and_write(planned: Any) -> None:
            finish(planned)
            if dist.get_rank() == 1 and weights._block.value.round == 1:
                served["weight"][321, 7] = 0

        weights._target.finish = finish_and_write  # type: ignore[method-assign]
        answer = catch(lambda: weights.update(timeout_seconds=60))
        assert weights.update(timeout_seconds=60).digests == {"weight": hexadecimal(weight(1.0, 640, 512)["weight"])}
    return answer


def test_the_replica_that_differs_is_named_by_all_ranks(run_jobs: Any, tmp_path: Path) -> None:
    _, answers = run_jobs((1, train_whole, (str(tmp_path),)), (2, serve_whole, (str(tmp_path),)))
    for answer in answers:
        assert answer[:4] == (ContradictionError, 1, "weight", "rows 320-329"), answer
