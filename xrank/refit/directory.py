"""The directory in which a trainer and engines find each other: each rank registers there what it lends.

A registration contains the token with which its rank's memory can be read, so it is a file of mode 0600. It appears by
a rename. In a directory where all users may write, anything may have its name: kind and owner are looked at before a
byte is read. In the place of the trainer's registration it is refused by name, among those of engines it is passed
over. A registration proves nothing about the life of its process: `peers` does.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import CorruptError, UsageError, XrankError
from xrank.layout.stored_model import StoredModel
from xrank.readers.live.models import LiveModel, read_ranks
from xrank.recipes.decision import Purpose, Request, decide
from xrank.recipes.found_source import FoundSource, OwnConfig, choose_config
from xrank.recipes.sources import find_live_source
from xrank.storage.entries import Entry
from xrank.storage.shared_directory import list_names, make_directory
from xrank.system import NEW, NO_LINK, READ, user_id
from xrank.system import replace as replace_file

MADE = "xrank.made/"
"""Before the Hugging Face name of a tensor that a rank has made, which no tensor of the trainer's model has."""

_TRAINER = "trainer.json"
_FORMAT = 2
_HEAD = re.compile(rb'\{"format": %d, "id": "([0-9a-f]{32})"' % _FORMAT)
_MAX_NBYTES = 1 << 30
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}
"""Errors of opening a link or a socket."""
_TAKEN = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
"""Errors of a rename to the name of another user's file or of a folder."""


class RankRegistration(Struct, frozen=True):
    """What a rank has registered."""

    id: str
    """Random; a new process writes a new one."""
    content: Mapping[str, Any]
    path: str

    @property
    def number(self) -> int:
        """The number by which statuses refer to a trainer's offer."""
        return crc32(self.id.encode())

    def describe(self, what: str, want: str) -> Entry:
        """Return the content, whose reads name what it lacks: `want`, the entries of `what`."""
        return Entry(self.content, lambda fault: _content_error(self.path, f"does not describe {what}", fault, want))


class Address:
    """A directory that the ranks of both jobs see; it is created if it is absent."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        make_directory(self.path)
        mode = os.stat(self.path).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UsageError(
                f"{self.path}: other users may replace files in this directory",
                file=self.path,
                got=f"mode {stat.S_IMODE(mode):04o}",
                next_step=f"type chmod o-w {self.path}, or choose another directory",
            )
        self.trainer_path = os.path.join(self.path, _TRAINER)

    def read_trainer(self) -> RankRegistration | None:
        """Return the trainer's registration; None if no trainer is registered."""
        return self._read(_TRAINER)

    def find_trainer_id(self) -> str | None:
        """Return the id of the trainer's registration, without its content, which may be large."""
        return self._read_id(_TRAINER)

    def find_all(self, kind: str, known: Mapping[str, RankRegistration] | None = None) -> dict[str, RankRegistration]:
        """Return the registrations of a kind by file name; those of `known` names are not read again.

        Kinds are ``engine``: ranks of engines; ``relay``: ranks that lend their weights to other engines; ``left``:
        the last words of engine ranks that have closed; ``failure``: ends of offers.
        """
        found = {}
        for name in sorted(list_names(self.path)):
            if name.startswith(f"{kind}-") and name.endswith(".json"):
                with suppress(UsageError):  # anything that another user has put there is not a rank of this job
                    if (one := (known or {}).get(name) or self._read(name)) is not None:
                        found[name] = one
        return found

    def register_trainer(self, content: Mapping[str, Any]) -> RankRegistration:
        """Register a trainer, in place of an earlier one."""
        made = self._write(_TRAINER, content)
        with suppress(CorruptError):
            for failure in self.find_all("failure").values():  # of earlier offers
                self.remove(failure)
        return made

    def register(self, kind: str, engine: str, rank: int, content: Mapping[str, Any]) -> RankRegistration:
        """Register an engine rank as of a kind (`find_all`), in place of an earlier registration."""
        return self._write(f"{kind}-{engine}-{rank}.json", {"engine": engine, "rank": rank, **content})

    def write_failure(self, offer: RankRegistration, error: XrankError) -> None:
        """Write down why an offer ended, for the ranks of the trainer that have not closed it yet."""
        self._write(f"failure-{offer.id}.json", {"error": error.to_record()})

    def read_failure(self, offer: RankRegistration) -> XrankError | None:
        """Return why an offer ended; None if no rank has written it down."""
        if (found := self._read(f"failure-{offer.id}.json")) is None:
            return None
        return XrankError.from_record(found.describe("the end of an offer", "its error")["error"].table())

    def has(self, registration: RankRegistration) -> bool:
        """Return whether a registration, or a newer one in its place, is there."""
        return os.path.exists(registration.path)

    def remove(self, registration: RankRegistration) -> None:
        """Remove a registration, unless another one is there in its place."""
        with suppress(OSError, UsageError, CorruptError):
            if self._read_id(os.path.basename(registration.path)) == registration.id:
                os.unlink(registration.path)

    def _write(self, name: str, content: Mapping[str, Any]) -> RankRegistration:
        path, own_id = os.path.join(self.path, name), os.urandom(16).hex()
        staged = os.path.join(self.path, f".{name}-{own_id}")
        text = json.dumps({"format": _FORMAT, "id": own_id, **content})
        try:
            with os.fdopen(os.open(staged, NEW, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            replace_file(staged, path)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(staged)
            if isinstance(error, OSError) and error.errno in _TAKEN:
                raise _place_error(path, str(error.strerror)) from None
            raise
        return RankRegistration(own_id, content, path)

    def _read(self, name: str) -> RankRegistration | None:
        path = os.path.join(self.path, name)
        if (text := _read_own_file(path, _MAX_NBYTES)) is None:
            return None
        want = f"a registration of format {_FORMAT}"
        content = Entry.parse(
            text, lambda fault: _content_error(path, "is not a registration of xrank's", fault, want), is_bounded=False
        )
        if content["format"].value != _FORMAT:
            content["format"].refuse(str(_FORMAT))
        return RankRegistration(content["id"].text(), content.table(), path)

    def _read_id(self, name: str) -> str | None:
        head = _HEAD.match(_read_own_file(os.path.join(self.path, name), 100) or b"")
        if head is not None:
            return head[1].decode()
        found = self._read(name)
        return None if found is None else found.id


def _content_error(path: str, problem: str, got: str, want: str) -> CorruptError:
    next_step = "use the same version of xrank in both jobs, or another directory"
    return CorruptError(f"{path} {problem}", file=path, got=got, want=want, next_step=next_step)


def _place_error(path: str, got: str) -> UsageError:
    return UsageError(
        f"{path} belongs to a different user, or is not a registration, so this rank cannot replace it",
        file=path,
        got=got,
        want=f"a file of user {user_id()}, of {_MAX_NBYTES:,} bytes at most, or nothing",
        next_step="start both jobs as the same user, with a directory that no other user may write to",
    )


def _read_own_file(path: str, nbytes: int) -> bytes | None:
    """Return the first bytes of a file of this user, None if it is absent; wait for no writer, and follow no link."""
    try:
        fd = os.open(path, READ | NO_LINK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in _NOT_A_FILE:
            raise _place_error(path, str(error.strerror)) from None
        raise
    try:
        status = os.fstat(fd)
        if status.st_uid != user_id() or not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_NBYTES:
            got = f"{stat.filemode(status.st_mode)} of user {status.st_uid}, {status.st_size:,} bytes"
            raise _place_error(path, got)
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(nbytes)
    finally:
        os.close(fd)


class TrainerModel(Struct, frozen=True, eq=False):
    """A trainer's model in the memory of its ranks."""

    live: LiveModel
    source: StoredModel
    """The model under Hugging Face's names."""
    config: Mapping[str, Any] | None
    padded_names: frozenset[str]
    """Tensors that may have more rows in an engine, as engines pad a vocabulary."""
    adapter_names: frozenset[str] = frozenset()
    """Tensors of a LoRA adapter, under the names in PEFT's folders."""
    adapter_config: str | None = None
    """Text of its adapter_config.json."""

    def name_as(self, module_shapes: Mapping[str, tuple[int, ...] | None]) -> StoredModel:
        """Return the model in the form that a module has in memory."""
        found = FoundSource(self.source, self.config)
        return decide(found, Request(Purpose.MODULE, module_shapes=module_shapes)).source


def find_trainer_ranks(registration: RankRegistration) -> list[tuple[int, dict[str, Any]]]:
    """Return the ranks of a trainer, each with its offer; a `CorruptError` if its registration lacks them."""
    content = registration.describe("a trainer's ranks", "ranks, and each one's model and offer")
    ranks = content["ranks"].counts(below=1 << 31)
    parts = content["parts"].entries(length=len(ranks))
    if not ranks:
        content["ranks"].refuse("a list with a rank")
    return [(rank, part["offer"].table()) for rank, part in zip(ranks, parts, strict=True)]


def read_trainer_model(registration: RankRegistration) -> TrainerModel:
    """Return the model of a trainer's registration; nothing of the ranks' memory is read."""
    content = registration.describe("a model", "ranks, their parts, a recipe, aliases, a config and names")
    ranks, parts = [rank for rank, _ in find_trainer_ranks(registration)], content["parts"].entries()
    own, _ = choose_config([OwnConfig.from_entry(part["own"]) for part in parts])
    recipe, config = content.get("recipe"), content.get("config")
    aliases = {name: target.text() for name, target in content["aliases"].items()}
    names, dropped = content["names"].texts(), frozenset(content["dropped"].texts())
    live = read_ranks([part["model"].text() for part in parts], ranks=ranks)
    shards, made = [], []
    for shard in live.stored.shards:
        if shard.name.startswith(MADE):
            made.append(replace(shard, name=shard.name.removeprefix(MADE)))
        else:
            shards.append(shard)
    found = find_live_source(replace(live.stored, shards=tuple(shards)), own, None)
    found = found if config is None else replace(found, config=config.table())
    decision = decide(
        found,
        Request(Purpose.MODEL, recipe=None if recipe is None else recipe.text(), aliases=aliases, file_names=names),
    )
    kept = [shard for shard in decision.source.shards if shard.name not in dropped]
    source = replace(decision.source, shards=(*kept, *made))
    adapted = decision.adapted
    own_names, config_text = (frozenset[str](), None) if adapted is None else (adapted.own, adapted.config_text)
    return TrainerModel(live, source, found.config, decision.padded_names, own_names, config_text)
