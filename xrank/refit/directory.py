"""The directory in which a trainer and engines find each other: one card of the trainer, one of each engine rank.

A card has the token with which its rank's memory can be read, so cards are files of mode 0600. They appear by a rename.
In a directory where all users may write, anything may have a card's name: kind and owner are looked at before a byte is
read. In the place of the trainer's card it is refused by name, among those of engines it is passed over. A card proves
nothing about the life of its process: `peer_rank` does.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from xrank.decisions.sources import find_live_source, open_base_model
from xrank.errors import CorruptError, RankFailedError, RankTimeoutError, UsageError
from xrank.formats.entries import Entry
from xrank.lending.lent_model import ModelRequest
from xrank.plan.source import StoredModel
from xrank.ranks.directory_messages import list_names, make_directory
from xrank.ranks.team import Team, path_text
from xrank.readers.live.ranks import LiveModel, read_ranks
from xrank.recipes.decision import Purpose, Request, decide
from xrank.recipes.found_source import FoundSource
from xrank.recipes.own_config import OwnConfig, choose_config
from xrank.refit.peers import PeerRank, Phase
from xrank.system import NEW, NO_LINK, READ, replace, user_id

_TRAINER = "trainer.json"
_ENGINE = "engine-"
_RELAY = "relay-"
_LEFT = "left-"
_FAILURE = "failure-"
_ENDING = ".json"
_FORMAT = 2
_MAX_NBYTES = 1 << 30
_NOT_A_CARD = {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}
"""Errors of opening a link or a socket."""
_TAKEN = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
"""Errors of a rename to the name of another user's file or of a folder."""


@dataclass(frozen=True, slots=True)
class Card:
    """The content of a card."""

    id: str
    """Random; a new process writes a new one."""
    content: Mapping[str, Any]
    path: str

    def describe(self, what: str, want: str) -> Entry:
        """Return the content, whose reads name what the card does not describe.

        Args:
            what: the subject of the entries.
            want: the entries.
        """
        return Entry(self.content, lambda fault: _content_error(self.path, f"does not describe {what}", fault, want))


class Address:
    """A directory that the ranks of both jobs see.

    Args:
        path: the directory; it is created if it is absent.

    Raises:
        UsageError: the path is not a directory, or other users may write to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        make_directory(self.path)
        status = os.stat(self.path)
        if status.st_mode & 0o002 and not status.st_mode & 0o1000:
            raise UsageError(
                f"{self.path}: other users may replace the cards in this directory",
                file=self.path,
                got=f"mode {status.st_mode & 0o7777:04o}",
                want="a directory that only its owner or group may write to",
                next_step=f"type chmod o-w {self.path}, or choose another directory",
            )

    @property
    def trainer_path(self) -> str:
        """Path of the trainer's card."""
        return os.path.join(self.path, _TRAINER)

    def read_trainer(self) -> Card | None:
        """Return the trainer's card; None if there is none.

        Raises:
            UsageError: another user has written it.
            CorruptError: it is damaged.
        """
        return self._read(_TRAINER)

    def read_engines(self, known: Mapping[str, Card]) -> dict[str, Card]:
        """Return the cards of all engine ranks by file name; files of known names are not read again."""
        return self._read_all(_ENGINE, known)

    def read_relays(self) -> list[Card]:
        """Return the cards of all engine ranks that lend their weights to other engines."""
        return list(self._read_all(_RELAY, {}).values())

    def write_trainer(self, content: Mapping[str, Any]) -> Card:
        """Write the trainer's card, in place of an earlier one."""
        card = self._write(_TRAINER, content)
        with suppress(CorruptError):
            for failure in self._read_all(_FAILURE, {}).values():  # of earlier offers
                self.remove(failure)
        return card

    def write_engine(self, engine: str, rank: int, content: Mapping[str, Any]) -> Card:
        """Write the card of an engine rank."""
        return self._write(f"{_ENGINE}{engine}-{rank}{_ENDING}", content)

    def write_relay(self, engine: str, rank: int, content: Mapping[str, Any]) -> Card:
        """Write the card of an engine rank that lends its weights, in place of an earlier one."""
        return self._write(f"{_RELAY}{engine}-{rank}{_ENDING}", content)

    def write_left(self, engine: str, rank: int, content: Mapping[str, Any]) -> Card:
        """Write the last words of an engine rank that closes, for the trainer."""
        return self._write(f"{_LEFT}{engine}-{rank}{_ENDING}", content)

    def read_left(self) -> list[Card]:
        """Return the last words of all engine ranks that have closed."""
        return list(self._read_all(_LEFT, {}).values())

    def write_failure(self, offer: Card, error: Mapping[str, Any]) -> None:
        """Write down why an offer ended, for the ranks of the trainer that have not closed it yet."""
        self._write(f"{_FAILURE}{offer.id}{_ENDING}", {"error": dict(error)})

    def read_failure(self, offer: Card) -> Mapping[str, Any] | None:
        """Return why an offer ended; None if no rank has written it down."""
        found = self._read(f"{_FAILURE}{offer.id}{_ENDING}")
        if found is None:
            return None
        return found.describe("the end of an offer", "its error")["error"].table()

    def has(self, card: Card) -> bool:
        """Return whether a card, or a newer one in its place, is there."""
        return os.path.exists(card.path)

    def remove(self, card: Card) -> None:
        """Remove a card, unless another one is there in its place."""
        with suppress(OSError, UsageError, CorruptError):
            there = self._read(os.path.basename(card.path))
            if there is not None and there.id == card.id:
                os.unlink(card.path)

    def _read_all(self, start: str, known: Mapping[str, Card]) -> dict[str, Card]:
        found = {}
        for name in sorted(list_names(self.path)):
            if name.startswith(start) and name.endswith(_ENDING):
                with suppress(UsageError):  # anything that another user has put there is not a rank of this job
                    card = known.get(name) or self._read(name)
                    if card is not None:
                        found[name] = card
        return found

    def _write(self, name: str, content: Mapping[str, Any]) -> Card:
        path, card_id = os.path.join(self.path, name), secrets.token_hex(16)
        staged = os.path.join(self.path, f".{name}-{card_id}")
        text = json.dumps({"format": _FORMAT, "id": card_id, **content})
        try:
            with os.fdopen(os.open(staged, NEW, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            replace(staged, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(staged)
            if error.errno in _TAKEN:
                raise _kind_error(path, str(error.strerror)) from None
            raise
        except BaseException:
            with suppress(OSError):
                os.unlink(staged)
            raise
        return Card(card_id, content, path)

    def _read(self, name: str) -> Card | None:
        path = os.path.join(self.path, name)
        text = _read_own_file(path)
        if text is None:
            return None
        want = f"a card of format {_FORMAT}"
        content = Entry.parse(
            text, lambda fault: _content_error(path, "is not a card of xrank's", fault, want), is_bounded=False
        )
        if content["format"].value != _FORMAT:
            content["format"].refuse(str(_FORMAT))
        return Card(content["id"].text(), content.table(), path)


def _content_error(path: str, problem: str, got: str, want: str) -> CorruptError:
    return CorruptError(
        f"{path} {problem}",
        file=path,
        got=got,
        want=want,
        next_step="use the same version of xrank in both jobs, or another directory",
    )


def _owner_error(path: str, got: str) -> UsageError:
    return UsageError(
        f"{path}: another user has written this card",
        file=path,
        got=got,
        want=f"a card of user {user_id()}",
        next_step="start both jobs as one user, or choose another directory",
    )


def _kind_error(path: str, got: str) -> UsageError:
    return UsageError(
        f"{path}: is not a card, and no card can take its place",
        file=path,
        got=got,
        want=f"a file of user {user_id()}, of {_MAX_NBYTES:,} bytes at most, or nothing",
        next_step="choose another directory, in which no other user may write, or move it elsewhere",
    )


def _read_own_file(path: str) -> bytes | None:
    """Return the content of a file of this user, None if there is none; wait for no writer, and follow no link.

    Raises:
        UsageError: it is not such a file.
    """
    try:
        fd = os.open(path, READ | NO_LINK)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _owner_error(path, str(error)) from None
    except OSError as error:
        if error.errno in _NOT_A_CARD:
            raise _kind_error(path, str(error.strerror)) from None
        raise
    try:
        status = os.fstat(fd)
        if status.st_uid != user_id():
            raise _owner_error(path, f"a file of user {status.st_uid}")
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_NBYTES:
            raise _kind_error(path, f"{stat.filemode(status.st_mode)}, {status.st_size:,} bytes")
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(_MAX_NBYTES)
    finally:
        os.close(fd)


MADE = "xrank.made/"
"""Before the Hugging Face name of a tensor that a rank has made, which no tensor of the trainer's model has."""


def number_of(card: Card) -> int:
    """Return the number by which statuses refer to an offer."""
    return crc32(card.id.encode())


def write_offer(
    place: Address,
    team: Team,
    request: ModelRequest,
    parts: Sequence[Mapping[str, Any]],
    dropped: Sequence[str] = (),
) -> Card:
    """Write the trainer's card on the first rank, and return it on every rank.

    Args:
        place: the address.
        team: the trainer's ranks, together.
        request: the arguments of the call.
        parts: by position in the team, each rank's model, offer and config.
        dropped: tensors under Hugging Face's names that engines do not get.
    """
    card = None
    if team.is_first:
        base = None if request.base_model is None else open_base_model(request.base_model)
        content = {
            "ranks": list(team.ranks),
            "parts": list(parts),
            "recipe": path_text(request.recipe),
            "aliases": {} if request.layouts is None else dict(request.layouts.aliases),
            "config": None if base is None else base.config,
            "names": [] if base is None else list(base.tensors),
            "dropped": list(dropped),
        }
        card = place.write_trainer(content)
    card_id = team.broadcast("the offer's card", None if card is None else card.id)
    return card or Card(card_id, {}, place.trainer_path)


def check_no_trainer(place: Address) -> None:
    """Check that no live trainer offers its weights at the address.

    Raises:
        UsageError: one does, or may do so on another host.
    """
    card = place.read_trainer()
    if card is None:
        return
    rank, offer = find_trainer_ranks(card)[0]
    try:
        peer = PeerRank(f"trainer rank {rank}", rank, offer)
    except CorruptError:
        return
    try:
        if peer.read().phase is Phase.ENDED:
            return
    except (RankFailedError, RankTimeoutError):
        if not peer.may_return:
            return
    finally:
        peer.close()
    raise UsageError(
        f"another trainer offers its weights at {place.path}",
        file=card.path,
        got=f"an offer of {peer.place}",
        want="one trainer at an address",
        next_step="close the other offer, or choose another directory",
    )


def find_trainer_ranks(card: Card) -> list[tuple[int, dict[str, Any]]]:
    """Return the ranks of a trainer's card, each with its offer.

    Raises:
        CorruptError: the card lacks them.
    """
    content = card.describe("a trainer's ranks", "ranks, and each one's model and offer")
    ranks = content["ranks"].counts(below=1 << 31)
    parts = content["parts"].entries(length=len(ranks))
    if not ranks:
        content["ranks"].refuse("a list with a rank")
    return [(rank, part["offer"].table()) for rank, part in zip(ranks, parts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class TrainerModel:
    """A trainer's model in the memory of its ranks."""

    live: LiveModel
    source: StoredModel
    """The model under Hugging Face's names."""
    config: Mapping[str, Any] | None
    padded_names: frozenset[str]
    """Tensors that may have more rows in an engine, as engines pad a vocabulary."""

    def name_as(self, module_shapes: Mapping[str, tuple[int, ...] | None]) -> StoredModel:
        """Return the model in the form that a module has in memory.

        Args:
            module_shapes: name in the module -> global shape; None where one rank does not know it.
        """
        found = FoundSource(self.source, self.config)
        return decide(found, Request(Purpose.MODULE, module_shapes=module_shapes)).source


def read_trainer_model(card: Card) -> TrainerModel:
    """Return the model of a trainer's card; nothing of the ranks' memory is read.

    Raises:
        CorruptError: the card does not describe a model.
        LayoutError, UsageError: no recipe fits the names; the trainer has raised it before.
    """
    content = card.describe("a model", "ranks, their parts, a recipe, aliases, a config and names")
    ranks, parts = [rank for rank, _ in find_trainer_ranks(card)], content["parts"].entries()
    own, _ = choose_config([OwnConfig.from_entry(part["own"]) for part in parts])
    recipe, config = content.get("recipe"), content.get("config")
    aliases = {name: target.text() for name, target in content["aliases"].items()}
    names, dropped = content["names"].texts(), frozenset(content["dropped"].texts())
    live = read_ranks([part["model"].text() for part in parts], ranks=ranks)
    own_shards = tuple(shard for shard in live.stored.shards if not shard.name.startswith(MADE))
    found = find_live_source(dataclasses.replace(live.stored, shards=own_shards), own, None)
    found = found if config is None else dataclasses.replace(found, config=config.table())
    decision = decide(
        found,
        Request(Purpose.MODEL, recipe=None if recipe is None else recipe.text(), aliases=aliases, file_names=names),
    )
    kept = [shard for shard in decision.source.shards if shard.name not in dropped]
    made = [
        dataclasses.replace(shard, name=shard.name.removeprefix(MADE))
        for shard in live.stored.shards
        if shard.name.startswith(MADE)
    ]
    source = dataclasses.replace(decision.source, shards=(*kept, *made))
    return TrainerModel(live, source, found.config, decision.padded_names)
