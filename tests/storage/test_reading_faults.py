"""A gather from a store on a bad day: the right model or a refusal that names object and range, before the deadline."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.storage.fault_proxy import EVERY, TEMPORARY, choose_by_seed
from tests.storage.histories import SPEED, TIMEOUT_SECONDS, make_seeds, set_up, speed_up
from tests.storage.servers import KEY_ID, SECRET, Bucket, open_proxy
from xrank.commands.checkpoint import open_checkpoint
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.engine import object_records
from xrank.errors import ContradictionError, XrankError
from xrank.testing.reader_contract import read_model, whole

_SEEDS_A_JOB = 25


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    make_seeds(metafunc, count=50, soak=1000, a_job=_SEEDS_A_JOB)


def _model(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = {"embed": (700, 256), "up": (400, 256), "down": (256, 400), "norm": (256,), "bias": (3,)}
    return {f"{name}.weight": torch.rand(size, generator=random) for name, size in sizes.items()}


def _write_checked(folder: Path, model: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint whose every byte has a checksum."""
    folder.mkdir(parents=True)
    torch.save(model, folder / "model.pt")
    return folder


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    speed_up(monkeypatch)
    # Small blocks, so that a small model takes many requests.
    monkeypatch.setattr(object_records, "BLOCK_NBYTES", 64 << 10)


def _through(proxy_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy_url)


def test_seeded_histories(
    first_seed: int, small_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    url = small_bucket.put_folder(_write_checked(tmp_path / "source", model), "run")
    expected = {name: whole(tensor) for name, tensor in model.items()}
    ends = {"right": 0, "refused": 0}
    with open_proxy(small_bucket.server) as proxy:
        set_up(proxy)
        _through(proxy.url, monkeypatch)
        for seed in range(first_seed, first_seed + _SEEDS_A_JOB):
            kinds = TEMPORARY if seed % 2 else EVERY
            proxy.restart(choose_by_seed(seed, 0.1 if seed % 2 else 0.03, kinds))
            out, started = tmp_path / f"out-{seed}", time.monotonic()
            try:
                if seed % 3:
                    gather_checkpoint(f"{url}/model.pt", out)
                    read = read_model(out)
                else:  # its large tensors are received where they stay
                    checkpoint = open_checkpoint(f"{url}/model.pt")
                    read = {name: whole(checkpoint[name]) for name in checkpoint}
                assert read == expected, f"seed {seed}: a wrong model"
                ends["right"] += 1
            except XrankError as error:
                ends["refused"] += 1
                assert not os.path.exists(out), f"seed {seed}: a refused gather left an output"
                assert error.file is not None and error.file.startswith("s3://"), f"seed {seed}: {error}"
                assert SECRET not in f"{error.to_dict()}{error.__notes__}" and KEY_ID not in str(error.to_dict())
            # Planning and copying each meet the deadline once at most, for the requests that are under way together.
            assert time.monotonic() - started < 10 * TIMEOUT_SECONDS / SPEED + 30, f"seed {seed}: slow"
    assert ends["right"], ends


def test_a_store_that_only_throttles_is_given_up_with_object_and_range(
    small_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = small_bucket.put_folder(_write_checked(tmp_path / "source", _model()), "run")
    with open_proxy(small_bucket.server) as proxy:
        _through(proxy.url, monkeypatch)
        monkeypatch.setenv("XRANK_STORE_TIMEOUT", "20")
        proxy.choose = lambda number, method, path: (
            "throttled" if method == "GET" and path.endswith("model.pt") else None
        )
        with pytest.raises(XrankError) as failure:
            gather_checkpoint(f"{url}/model.pt", tmp_path / "out")
    assert failure.value.exit_code == 1 and "429" in (failure.value.got or "")
    assert re.search(r"s3://\S+/model.pt could not be read at bytes [\d,]+ to [\d,]+, tried", failure.value.message)


def test_an_object_that_changes_meanwhile_is_refused(
    small_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new bytes are a sound checkpoint, too: only the pinned etag shows the mixture."""
    url = small_bucket.put_folder(_write_checked(tmp_path / "source", _model()), "run")
    other = (_write_checked(tmp_path / "other", _model(1)) / "model.pt").read_bytes()
    client = small_bucket.client()  # made here, because the proxy answers nothing while it chooses

    def choose(number: int, method: str, path: str) -> None:
        if number == 8:
            client.put_object(Bucket=small_bucket.name, Key="run/model.pt", Body=other)

    with open_proxy(small_bucket.server) as proxy:
        _through(proxy.url, monkeypatch)
        proxy.choose = choose
        with pytest.raises(ContradictionError, match="changed while it was being read"):
            gather_checkpoint(f"{url}/model.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_secrets_are_in_no_report_manifest_or_error(small_bucket: Bucket, tmp_path: Path) -> None:
    url = small_bucket.put_folder(_write_checked(tmp_path / "source", _model()), "run")
    report = gather_checkpoint(f"{url}/model.pt", tmp_path / "out")
    checked = verify_model(tmp_path / "out", against=f"{url}/model.pt")
    assert checked.ok
    with pytest.raises(XrankError) as failure:
        gather_checkpoint(f"{url}/absent.pt", tmp_path / "absent")
    texts = [str(report.to_dict()), str(report), str(checked.to_dict()), str(failure.value.to_dict())]
    texts += [file.read_bytes().decode("latin1") for file in (tmp_path / "out").iterdir()]
    assert not any(secret in text for text in texts for secret in (SECRET, KEY_ID))


def test_rows_and_columns_are_read_once(small_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests more than blocks, and few bytes more than the model's."""
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {
        f"layers.{k}.weight": torch.from_numpy(np.random.default_rng(k).random((512, 256), "f4")) for k in range(4)
    }
    save_file(tensors, folder / "model.safetensors")
    url = small_bucket.put_folder(folder, "run")
    with open_proxy(small_bucket.server) as proxy:
        _through(proxy.url, monkeypatch)
        gather_checkpoint(url, tmp_path / "out")
        read = sum(one.answered_nbytes for one in proxy.requests if one.method == "GET")
    assert read_model(tmp_path / "out") == {name: whole(tensor) for name, tensor in tensors.items()}
    nbytes = (folder / "model.safetensors").stat().st_size
    assert read <= 1.02 * nbytes + (128 << 10)  # of which metadata takes 64 KiB, and lists of names the rest
