"""The stage seen from outside: what is refused, resumed, kept, removed, and how two gathers meet."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.storage.gathered import NBYTES, SHARDS, beside, expected, gather, seen, shard
from tests.storage.kill_points import in_child
from xrank.errors import (
    ContradictionError,
    CorruptError,
    NoSpaceError,
    OutputExistsError,
    UnsafeError,
    UsageError,
    XrankError,
)
from xrank.storage import disk
from xrank.storage.folder_stage import parse_journal, read_journal
from xrank.storage.output_place import JOURNAL_NAME, OutputPlace
from xrank.storage.staging import check_output, open_stage


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "companion.txt").write_bytes(b"print()\n")
    return tmp_path / "model"


def interrupted(out: Path, version: str = "new", shards: int = 1) -> Path:
    """Leave a stage with some finished shards and an unfinished one, as a Ctrl-C does."""
    with pytest.raises(KeyboardInterrupt), open_stage(out, plan_digest=f"plan of {version}") as stage:
        for name in SHARDS[:shards]:
            fd = stage.create_part(name, NBYTES)
            os.pwrite(fd, shard(version, name), 0)
            stage.finish_part(name, fd, NBYTES, disk_digest(shard(version, name)))
        if shards < len(SHARDS):
            os.close(stage.create_part(SHARDS[shards], NBYTES))
        raise KeyboardInterrupt
    return Path(stage.path)


def disk_digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)


class TestOutputThatExists:
    @pytest.fixture(params=["file", "empty folder", "full folder", "link", "dangling link", "fifo"])
    def taken(self, request: pytest.FixtureRequest, out: Path) -> str:
        match request.param:
            case "file":
                out.write_text("mine")
            case "empty folder":
                out.mkdir()
            case "full folder":
                out.mkdir()
                (out / "thesis.tex").write_text("mine")
            case "link":
                (out.parent / "elsewhere").mkdir()
                out.symlink_to("elsewhere")
            case "dangling link":
                out.symlink_to("nowhere")
            case "fifo":
                os.mkfifo(out)
        return str(request.param)

    def test_is_refused(self, out: Path, taken: str) -> None:
        before = sorted(os.listdir(out.parent))
        for action in (lambda: check_output(out, overwrite=False), lambda: gather(out)):
            with pytest.raises(OutputExistsError) as caught:
                action()
            assert caught.value.exit_code == 2
            assert str(out) in str(caught.value)
        assert sorted(os.listdir(out.parent)) == before

    def test_what_is_no_model_is_not_replaced(self, out: Path, taken: str) -> None:
        if taken == "empty folder":
            gather(out, overwrite=True)
            assert seen(out) == "new"
            return
        with pytest.raises(OutputExistsError, match="not a model"):
            gather(out, overwrite=True)
        if taken == "full folder":
            assert (out / "thesis.tex").read_text() == "mine"

    @pytest.mark.parametrize("name", ["config.json", "xrank_manifest.json", "x.safetensors"])
    def test_a_model_is_replaced(self, out: Path, name: str) -> None:
        out.mkdir()
        (out / name).write_text("")
        gather(out, overwrite=True)
        assert seen(out) == "new"
        assert beside(out) == []

    @pytest.mark.parametrize("name", ["config.json", "xrank_manifest.json"])
    def test_states_make_room_for_states_alone(self, out: Path, name: str) -> None:
        """Nor for a model that was begun before they were there."""
        said = pytest.raises(OutputExistsError, match="the states of 2 ranks")
        with said, open_stage(out, plan_digest="p", overwrite=True) as stage:
            stage.write_file("xrank_manifest.json", b"")
            out.mkdir()
            for left in (name, "rank_0_state.pth", "rank_11_state.pth"):
                (out / left).touch()
            stage.commit()
        with said:
            check_output(out, overwrite=True)
        assert len(os.listdir(out)) == 3 and beside(out) == []
        with open_stage(out, plan_digest="p", overwrite=True, replaces_states=True) as stage:
            stage.write_file("xrank_manifest.json", b"")
            stage.commit()
        assert os.listdir(out) == ["xrank_manifest.json"]

    def test_that_appears_meanwhile_is_left(self, out: Path) -> None:
        with pytest.raises(OutputExistsError, match="while this gather ran"), open_stage(out, plan_digest="p") as stage:
            stage.write_file("xrank_manifest.json", b"")
            out.mkdir()
            (out / "other").touch()
            stage.commit()
        assert os.listdir(out) == ["other"]
        assert beside(out) == []

    def test_that_appears_meanwhile_leaves_the_work_for_another_try(self, out: Path) -> None:
        with pytest.raises(OutputExistsError), open_stage(out, plan_digest="plan of new") as stage:
            fd = stage.create_part(SHARDS[0], NBYTES)
            os.pwrite(fd, shard("new", SHARDS[0]), 0)
            stage.finish_part(SHARDS[0], fd, NBYTES, disk_digest(shard("new", SHARDS[0])))
            stage.write_file("xrank_manifest.json", b"")
            out.mkdir()
            (out / "config.json").touch()
            stage.commit()
        assert gather(out, overwrite=True) == [SHARDS[0]]
        assert seen(out) == "new"


class TestPlace:
    def test_parents_are_made(self, out: Path) -> None:
        deep = out.parent / "a" / "b" / "model"
        check_output(deep, overwrite=False)
        assert not (out.parent / "a").exists()
        with open_stage(deep, plan_digest="p") as stage:
            stage.write_file("xrank_manifest.json", b"")
            stage.commit()
        assert os.listdir(deep) == ["xrank_manifest.json"]

    def test_parent_is_a_file(self, out: Path) -> None:
        with pytest.raises(UsageError, match="not a folder"):
            check_output(out.parent / "companion.txt" / "model", overwrite=False)

    @pytest.mark.parametrize("path", ["/", "a\0b"])
    def test_no_name(self, path: str) -> None:
        with pytest.raises(UsageError):
            check_output(path, overwrite=False)

    def test_relative(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(out.parent)
        gather(Path("model"))
        assert seen(out) == "new"

    def test_linked_parent(self, out: Path) -> None:
        (out.parent / "link").symlink_to(".")
        with open_stage(out.parent / "link" / "model", plan_digest="p") as stage:
            assert os.path.dirname(stage.path) == str(out.parent)

    def test_parent_not_writable(self, out: Path) -> None:
        def work() -> None:
            os.setuid(65534)
            check_output(out, overwrite=False)

        if os.geteuid() != 0:
            pytest.skip("needs to become another user")
        error = in_child(work).error
        assert isinstance(error, UsageError)
        assert error.file is not None
        assert str(out).startswith(error.file)
        assert "owner uid" in str(error)

    def test_long_name(self, out: Path) -> None:
        with pytest.raises(UsageError, match="too long"):
            gather(out.parent / ("m" * 250))

    def test_names_of_another_output_are_not_touched(self, out: Path) -> None:
        for name in (".model.xrank-0123", ".model.xrank-0123456789abcdefg", ".model.xrank-0123456789ABCDEF"):
            (out.parent / name).mkdir()
        (out.parent / ".model2.xrank-0123456789abcdef").mkdir()
        (out.parent / ".model.xrank-0123456789abcdef").write_text("a file")
        (out.parent / ".model.xrank-0123456789abcde0").symlink_to(".model2.xrank-0123456789abcdef")
        before = beside(out)
        gather(out)
        assert beside(out) == before


class TestResume:
    def test_goes_on(self, out: Path) -> None:
        stage = interrupted(out)
        assert (stage / f"{SHARDS[1]}.part").exists()
        assert gather(out) == [SHARDS[0]]
        assert seen(out) == "new"
        assert beside(out) == []

    def test_not_asked_for(self, out: Path) -> None:
        interrupted(out)
        assert gather(out, resume=False) == []
        assert beside(out) == []

    def test_another_plan_is_told(self, out: Path) -> None:
        interrupted(out, "old", 2)
        with open_stage(out, plan_digest="plan of new") as stage:
            assert stage.finished == {}
            assert "a different plan" in stage.notes[0]
        assert gather(out) == []
        assert seen(out) == "new"

    def test_flipped_bytes_of_a_shard_are_found_by_its_digest(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        with open(stage / SHARDS[0], "r+b") as file:
            file.write(b"X")
        assert gather(out) == [SHARDS[1]]
        assert seen(out) == "new"

    def test_a_shard_of_another_size_or_kind_is_not_taken(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        (stage / SHARDS[0]).write_bytes(b"")
        (stage / SHARDS[1]).unlink()
        (stage / SHARDS[1]).symlink_to("/etc/passwd")
        assert gather(out) == []
        assert seen(out) == "new"

    def test_journal_damaged_at_any_byte(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        journal = (stage / JOURNAL_NAME).read_bytes()
        whole = parse_journal(journal)
        assert whole is not None
        for position in range(len(journal)):
            damaged = bytearray(journal)
            damaged[position] ^= 0x04
            found = parse_journal(bytes(damaged))
            assert found is None or found.lines == whole.lines[: len(found.lines)]
            # Any flip costs a line, but for one in JSON's own freedom: blanks.
            torn = parse_journal(journal[:position])
            assert torn is None or len(torn.lines) < 2

    def test_journal_torn_in_the_last_line(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        journal = stage / JOURNAL_NAME
        journal.write_bytes(journal.read_bytes()[:-5])
        assert gather(out) == [SHARDS[0]]
        assert seen(out) == "new"

    def test_journal_of_another_version_is_told(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        lines = (stage / JOURNAL_NAME).read_bytes().splitlines()
        head = json.loads(lines[0])
        from xrank.storage.commit import seal

        head.pop("xxh3")
        lines[0] = seal({**head, "version": 2}).rstrip()
        (stage / JOURNAL_NAME).write_bytes(b"\n".join(lines) + b"\n")
        with open_stage(out, plan_digest="plan of new") as again:
            assert again.finished == {}
            assert "journal" in again.notes[0]

    def test_a_fifo_as_journal_does_not_hang(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        (stage / JOURNAL_NAME).unlink()
        os.mkfifo(stage / JOURNAL_NAME)
        assert read_journal(str(stage)) is None
        assert gather(out) == []

    def test_foreign_files_in_the_stage_do_not_reach_the_output(self, out: Path) -> None:
        stage = interrupted(out, shards=2)
        (stage / "malware.py").write_text("")
        (stage / "folder").mkdir()
        (stage / "folder" / "x").write_text("")
        (stage / "config.json").symlink_to("/etc/passwd")
        assert len(gather(out)) == 2
        assert seen(out) == "new"
        assert not (out / "config.json").is_symlink()

    def test_a_stage_of_another_user_is_left(self, out: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs to give files away")
        stage = interrupted(out, shards=2)
        os.chown(stage, 65534, 65534)
        assert gather(out) == []
        assert stage.name in beside(out)

    def test_claiming_takes_a_live_stage_from_its_owner(self, out: Path) -> None:
        # Where the lock does not exclude (two NFS clients), the later gather wins and the earlier hears of it.
        with pytest.raises(OutputExistsError, match="took over"), open_stage(out, plan_digest="plan of new") as stage:
            fd = stage.create_part(SHARDS[0], NBYTES)
            (out.parent / ".model.xrank.lock").unlink()
            gather(out)
            stage.finish_part(SHARDS[0], fd, NBYTES, "0" * 32)
        assert seen(out) == "new"
        assert beside(out) == []


class TestFailure:
    def test_nothing_finished_leaves_nothing(self, out: Path) -> None:
        with pytest.raises(RuntimeError), open_stage(out, plan_digest="p") as stage:
            os.close(stage.create_part("a", 10))
            stage.write_file("config.json", b"")
            raise RuntimeError
        assert beside(out) == []

    def test_what_is_finished_is_kept_without_parts(self, out: Path) -> None:
        with pytest.raises(RuntimeError), open_stage(out, plan_digest="p") as stage:
            fd = stage.create_part("a", 1)
            stage.finish_part("a", fd, 1, "0" * 32)
            os.close(stage.create_part("b", 10))
            raise RuntimeError
        assert sorted(os.listdir(stage.path)) == [JOURNAL_NAME, "a"]

    def test_an_unfinished_part_is_not_committed(self, out: Path) -> None:
        with pytest.raises(XrankError, match="not finished"), open_stage(out, plan_digest="p") as stage:
            stage.write_file("xrank_manifest.json", b"")
            os.close(stage.create_part("a", 10))
            stage.commit()
        assert seen(out) == "absent"

    def test_wrong_size(self, out: Path) -> None:
        with pytest.raises(CorruptError), open_stage(out, plan_digest="p") as stage:
            stage.finish_part("a", stage.create_part("a", 10), 11, "0" * 32)
        assert beside(out) == []

    def test_a_full_disk_says_needed_and_free(self, out: Path) -> None:
        with pytest.raises(NoSpaceError) as caught, open_stage(out, plan_digest="p") as stage:
            stage.create_part("a", 2**43)
        assert caught.value.needed_nbytes == 2**43
        assert caught.value.free_nbytes is not None
        assert caught.value.free_nbytes < 2**43
        assert caught.value.next_step
        assert beside(out) == []

    @pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs")
    def test_a_full_tmpfs_is_asked_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = Path(f"/dev/shm/xrank-test-{os.getpid()}")
        place.mkdir()
        try:
            with pytest.raises(NoSpaceError) as caught, open_stage(place / "model", plan_digest="p") as stage:
                stage.create_part("a", 2**43)
            assert caught.value.needed_nbytes == 2**43
            with open_stage(place / "model", plan_digest="p") as stage:
                fd = stage.create_part("a", 2**20)
                assert os.fstat(fd).st_blocks == 0  # sized, not zeroed
                os.close(fd)
        finally:
            shutil.rmtree(place)

    @pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
    def test_no_reservation_here(self, out: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        def allocate(fd: int, nbytes: int) -> None:
            raise OSError(number, "")

        monkeypatch.setattr(disk, "allocate", allocate)
        gather(out)
        assert seen(out) == "new"

    def test_file_size_limit(self, out: Path) -> None:
        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            gather(out)

        error = in_child(work).error
        assert isinstance(error, UsageError)
        assert "ulimit -f" in str(error)
        assert error.next_step
        assert beside(out) == []

    def test_quota_at_close(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        close = os.close

        def full(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            close(fd)
            if path.endswith("-00001-of-00002.safetensors.part"):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "close", full)
        with pytest.raises(NoSpaceError, match="quota"):
            gather(out)
        assert seen(out) == "absent"

    def test_short_writes(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, content: write(fd, content[:3]))
        gather(out)
        monkeypatch.undo()
        assert seen(out) == "new"

    def test_output_that_reads_back_differently(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from xrank.storage import folder_stage as module

        sync = module.sync_folder

        def swap(path: str) -> None:
            sync(path)
            if out.exists():
                (out / "xrank_manifest.json").write_bytes(b"of somebody else")

        monkeypatch.setattr(module, "sync_folder", swap)
        with pytest.raises(XrankError, match="not the manifest"):
            gather(out)


class TestNames:
    @pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/../b", "a//b", "a\0", JOURNAL_NAME])
    def test_that_escape(self, out: Path, name: str) -> None:
        with open_stage(out, plan_digest="p") as stage:
            for action in (
                lambda: stage.part_path(name),
                lambda: stage.write_file(name, b""),
                lambda: stage.copy_file(name, "/etc/hosts"),
            ):
                with pytest.raises(UnsafeError):
                    action()

    @pytest.mark.parametrize("name", ["a b", "ä", "-x", "%s", "a\nb", "a\\b"])
    def test_that_are_kept(self, out: Path, name: str) -> None:
        with open_stage(out, plan_digest="p") as stage:
            stage.finish_part(name, stage.create_part(name, 1), 1, "0" * 32)
            stage.write_file("xrank_manifest.json", b"")
            stage.commit()
        assert sorted(os.listdir(out)) == sorted([name, "xrank_manifest.json"])


class TestCopies:
    def test_links_are_followed_for_reading(self, out: Path) -> None:
        (out.parent / "link").symlink_to("companion.txt")
        with open_stage(out, plan_digest="p") as stage:
            line = stage.copy_file("a", str(out.parent / "link"))
            assert line.nbytes == 8
            assert line.digest == disk_digest(b"print()\n")
            assert not Path(stage.path, "a").is_symlink()

    @pytest.mark.parametrize("source", ["fifo", "/dev/zero", "/dev", "missing"])
    def test_other_kinds(self, out: Path, source: str) -> None:
        if source == "fifo":
            os.mkfifo(out.parent / "fifo")
        with open_stage(out, plan_digest="p") as stage:
            with pytest.raises(XrankError) as caught:
                stage.copy_file("a", os.path.join(out.parent, source))
            assert source in str(caught.value)

    def test_source_that_changes(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = out.parent / "companion.txt"
        read = os.read

        def grow(fd: int, count: int) -> bytes:
            content = read(fd, count)
            source.write_bytes(b"more than before")
            return content

        monkeypatch.setattr(os, "read", grow)
        with open_stage(out, plan_digest="p") as stage, pytest.raises(ContradictionError, match="changed"):
            stage.copy_file("a", str(source))


class TestPermissions:
    @pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
    @pytest.mark.parametrize("setgid", [False, True])
    def test_are_the_umasks(self, out: Path, mask: int, setgid: bool) -> None:
        if setgid:
            out.parent.chmod(0o2755)
        before = os.umask(mask)
        try:
            gather(out)
        finally:
            os.umask(before)
        for path in (out, out / "code"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask | (0o2000 if setgid else 0)
        for path in (p for p in out.rglob("*") if p.is_file()):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path


class TestLinkAttacks:
    def test_link_as_lock(self, out: Path) -> None:
        (out.parent / "victim").write_text("mine")
        (out.parent / ".model.xrank.lock").symlink_to("victim")
        with pytest.raises(UsageError, match="not a file"):
            gather(out)
        assert (out.parent / "victim").read_text() == "mine"

    def test_fifo_as_lock_does_not_hang(self, out: Path) -> None:
        os.mkfifo(out.parent / ".model.xrank.lock")
        gather(out)
        assert seen(out) == "new"

    def test_folder_as_lock(self, out: Path) -> None:
        (out.parent / ".model.xrank.lock").mkdir()
        with pytest.raises(UsageError, match="not a file"):
            gather(out)

    def test_link_as_stage_is_not_followed(self, out: Path) -> None:
        victim = out.parent / "victim"
        victim.mkdir()
        (victim / "thesis.tex").write_text("mine")
        for suffix in ("", "-old"):
            (out.parent / f".model.xrank-0123456789abcdef{suffix}").symlink_to("victim")
        gather(out)
        assert (victim / "thesis.tex").read_text() == "mine"

    def test_links_inside_a_cleared_stage_are_not_followed(self, out: Path) -> None:
        victim = out.parent / "victim"
        victim.mkdir()
        (victim / "thesis.tex").write_text("mine")
        stage = out.parent / ".model.xrank-0123456789abcdef"
        stage.mkdir()
        (stage / JOURNAL_NAME).touch()
        (stage / "link").symlink_to("../victim")
        gather(out)
        assert (victim / "thesis.tex").read_text() == "mine"
        assert beside(out) == ["victim"]

    def test_link_in_place_of_a_part(self, out: Path) -> None:
        victim = out.parent / "victim"
        victim.write_text("mine")
        with open_stage(out, plan_digest="p") as stage:
            os.symlink(victim, stage.part_path("a"))
            os.close(stage.create_part("a", 10))
            os.symlink(victim, stage.part_path("b"))
            stage.write_file("b", b"new")
            os.unlink(Path(stage.path, JOURNAL_NAME))
            os.symlink(victim, Path(stage.path, JOURNAL_NAME))
            with pytest.raises(XrankError):
                stage.finish_part("c", stage.create_part("c", 1), 1, "0" * 32)
        assert victim.read_text() == "mine"


def _race(out: Path, barrier: Any, results: Any, overwrite: bool) -> None:
    for number in range(50):
        barrier.wait()
        target = out.parent / f"{out.name}{number}"
        try:
            gather(target, overwrite=overwrite)
            results.put((number, "won"))
        except OutputExistsError:
            results.put((number, "lost"))
        except BaseException as error:
            results.put((number, repr(error)))


class TestTwoGathers:
    def test_one_wins_whole_and_the_other_is_told(self, out: Path) -> None:
        context = multiprocessing.get_context("fork")
        barrier, results = context.Barrier(2), context.SimpleQueue()
        racers = [context.Process(target=_race, args=(out, barrier, results, False)) for _ in range(2)]
        for racer in racers:
            racer.start()
        found = sorted(results.get() for _ in range(100))
        for racer in racers:
            racer.join()
        for number in range(50):
            assert found[2 * number : 2 * number + 2] == [(number, "lost"), (number, "won")]
            assert seen(out.parent / f"{out.name}{number}") == "new"
        assert sorted(p.name for p in out.parent.glob(".*")) == []

    def test_without_a_lock_the_rename_decides(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from contextlib import nullcontext

        from xrank.storage import staging

        monkeypatch.setattr(staging, "hold_lock", lambda *_, **__: nullcontext())
        context = multiprocessing.get_context("fork")
        barrier, results = context.Barrier(2), context.SimpleQueue()
        racers = [context.Process(target=_race, args=(out, barrier, results, False)) for _ in range(2)]
        for racer in racers:
            racer.start()
        found = sorted(results.get() for _ in range(100))
        for racer in racers:
            racer.join()
        for number in range(50):
            pair = [what for _, what in found[2 * number : 2 * number + 2]]
            assert pair in (["lost", "won"], ["lost", "lost"]), pair
            assert seen(out.parent / f"{out.name}{number}") == ("new" if "won" in pair else "absent")

    def test_the_second_hears_who_is_at_it(self, out: Path) -> None:
        with open_stage(out, plan_digest="p"), pytest.raises(OutputExistsError, match=f"pid {os.getpid()}"):
            gather(out)
        gather(out)

    def test_a_killed_owner_holds_nothing(self, out: Path) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with open_stage(out, plan_digest="p"):
                os.write(write, b"x")
                time.sleep(60)
        os.read(read, 1)
        with pytest.raises(OutputExistsError, match=f"pid {pid}"):
            gather(out)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        gather(out)
        assert seen(out) == "new"
        assert beside(out) == []
        os.close(read)
        os.close(write)

    def test_no_locks_on_this_file_system(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import fcntl

        def flock(fd: int, operation: int) -> None:
            raise OSError(errno.ENOSYS, "no flock")

        monkeypatch.setattr(fcntl, "flock", flock)
        gather(out)
        assert seen(out) == "new"


def test_place_names(out: Path) -> None:
    place = OutputPlace.from_path(out)
    assert os.path.dirname(place.new_stage()) == str(out.parent)
    assert place.new_stage() != place.new_stage()
    assert expected("new").keys() >= set(SHARDS)
