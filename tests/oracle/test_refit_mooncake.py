"""Steps of a trainer over Mooncake's own transfer engine, on the loopback."""

import multiprocessing
import os
import signal

import pytest
import torch

import xrank
from xrank.errors import RankFailedError, UsageError, XrankError

try:
    import mooncake.engine  # noqa: F401
except ImportError as error:
    pytest.skip(f"Mooncake's engine cannot be loaded: {error}", allow_module_level=True)

SHAPE = (512, 384)


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1")
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")


def weights_of(step):
    rows = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + step
    return {"rows.weight": rows, "strided.weight": (rows * 2).t().contiguous().t(), "bias": rows[0].clone()}


def train(address, orders, options):
    torch.set_num_threads(1)
    model = weights_of(0)
    with xrank.offer_weights(model, address, snapshot=True, **options) as offer:
        for step in iter(orders.get, None):
            for name, values in weights_of(step).items():
                model[name].copy_(values)
            offer.publish(step)


@pytest.fixture
def trainer(tmp_path):
    """Start a trainer that publishes the steps that it is sent."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(**options):
        orders = context.Queue()
        process = context.Process(target=train, args=(str(tmp_path / "refit"), orders, options))
        process.start()
        started.append(process)
        return process, orders, str(tmp_path / "refit")

    yield start
    for process in started:
        process.kill()
        process.join()


def make_target():
    return {name: torch.zeros(SHAPE if name != "bias" else SHAPE[1:]) for name in weights_of(0)}


def assert_holds(target, step):
    assert all(target[name].equal(values) for name, values in weights_of(step).items())


def test_each_step_arrives_over_mooncake(trainer):
    process, orders, address = trainer(wire="mooncake")
    target = make_target()
    with xrank.take_weights(target, address, wire="mooncake") as weights:
        for step in (1, 2, 3):
            orders.put(step)
            report = weights.update(timeout_seconds=60)
            assert report.step == step and report.moved_nbytes == report.nbytes
            assert_holds(target, step)
    orders.put(None)
    process.join(60)
    assert process.exitcode == 0


def test_a_trainer_that_was_killed_is_named_and_the_next_one_serves(trainer):
    process, orders, address = trainer(wire="mooncake")
    target = make_target()
    with xrank.take_weights(target, address, wire="mooncake") as weights:
        orders.put(1)
        weights.update(timeout_seconds=60)
        process.kill()
        process.join()
        with pytest.raises(RankFailedError, match="trainer rank 0"):
            weights.update(timeout_seconds=60)
        assert_holds(target, 1)
        _, orders, _ = trainer(wire="mooncake")
        orders.put(5)
        assert weights.update(timeout_seconds=120).step == 5
        assert_holds(target, 5)


def test_bytes_that_a_stopped_process_sends_late_are_not_written(trainer):
    from xrank.ranks.loans import MooncakeEngine

    process, orders, address = trainer(wire="mooncake")
    target = make_target()
    with xrank.take_weights(target, address, wire="mooncake") as weights:
        orders.put(1)
        weights.update(timeout_seconds=60)
        orders.put(2)
        # Stopped between the statuses and the bytes: Mooncake's read fails, and the error names the rank.
        read = MooncakeEngine.read

        def stop_and_read(engine, *spans):
            os.kill(process.pid, signal.SIGSTOP)
            return read(engine, *spans)

        MooncakeEngine.read = stop_and_read
        try:
            with pytest.raises(XrankError, match="trainer rank 0"):
                weights.update(timeout_seconds=120)
        finally:
            MooncakeEngine.read = read
        assert weights.step is None
        for tensor in target.values():
            tensor.fill_(-1)
        os.kill(process.pid, signal.SIGCONT)
        orders.put(None)
        process.join(60)  # it has sent all that it ever sends
        assert all((tensor == -1).all() for tensor in target.values())


def test_a_trainer_without_mooncake_is_refused(trainer):
    _, orders, address = trainer()
    orders.put(1)
    with (
        xrank.take_weights(make_target(), address, wire="mooncake") as weights,
        pytest.raises(UsageError, match="trainer rank 0 does not offer its tensors through Mooncake"),
    ):
        weights.update(timeout_seconds=60)
