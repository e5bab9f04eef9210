"""A model in a store that another one replaces: what must be as it was, and what changes at one instant.

A store replaces one object at an instant. So the weights of the new model get names of their own beside the old ones,
and the file that readers begin with, the index or the only weights file, is replaced where it is still the same. All
other files must be those that are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from xrank.errors import IncompleteError, OutputExistsError, UsageError, option
from xrank.formats.entries import Entry
from xrank.stores.client import Store
from xrank.words import list_text
from xrank.writers.manifest import MANIFEST_NAME, parse_manifest
from xrank.writers.output_place import ATTESTATION_NAME, SIGNATURE_NAME
from xrank.writers.store_place import StorePlace

_INDEX_END = ".safetensors.index.json"
_NUMBERED = re.compile(r"-(\d{5,}-of-\d{5,}\.safetensors)")


@dataclass(frozen=True, slots=True)
class Replaced:
    """A model that another one replaces."""

    last: str
    """The file that readers begin with: the index, or the only weights file."""
    version: str
    """The etag of that file: it is replaced only while it has this one."""
    manifest_version: str
    weights: tuple[str, ...]
    """Names of the weights' files."""
    small: tuple[str, ...]
    """Names of all others, without the manifest."""

    @property
    def has_index(self) -> bool:
        """Whether its weights' files have names that only the index knows."""
        return self.last.endswith(_INDEX_END)

    @property
    def outdated(self) -> tuple[str, ...]:
        """The files that no reader needs once the new model is there: none of a name that it has, too."""
        return self.weights if self.has_index else ()

    @classmethod
    def from_entry(cls, record: Entry) -> Replaced:
        """Return what a journal contains; errors of `record`."""
        last, version, manifest_version = (record[key].text() for key in ("last", "version", "manifest_version"))
        return cls(last, version, manifest_version, record["weights"].texts(), record["small"].texts())


def find_replaced(place: StorePlace) -> Replaced | None:
    """Return the model that is at a place; None where nothing is.

    Raises:
        OutputExistsError: something else is there.
        UsageError: a store cannot replace it.
    """
    there = place.store.list_folder(place.key)
    if not there.objects and not there.folders:
        return None
    try:
        content, manifest_version = _read(place.store, place.file_key(MANIFEST_NAME))
    except IncompleteError as error:
        names = list_text(map(repr, sorted([*there.objects, *there.folders])), 3)
        raise OutputExistsError(
            f"{place.url}: holds {names}, and no model that xrank wrote, so {option('overwrite', True)} does not "
            "replace it",
            file=place.url,
            want="a model with its manifest, or nothing",
            next_step=f"choose another {option('out')}",
        ) from error
    manifest = parse_manifest(content, place.file_url(MANIFEST_NAME))
    weights = tuple(sorted({tensor["file"] for tensor in manifest["tensors"].values()}))
    others = [one["name"] for one in (*manifest["files"], *manifest["companions"]) if one["name"] not in weights]
    indexes = [name for name in others if name.endswith(_INDEX_END)]
    if len(indexes or weights) != 1:
        raise make_unlike_error(place.url, "its weights have several files and no index")
    signed = sorted({SIGNATURE_NAME, ATTESTATION_NAME} & there.objects.keys())
    if signed:
        raise make_unlike_error(place.url, f"it is signed ({signed[0]})")
    last = (indexes or weights)[0]
    version = place.store.head(place.file_key(last)).version
    return Replaced(last, version, manifest_version, weights, tuple(name for name in others if name != last))


def name_weights(name: str, replaced: Replaced, stage: str, url: str) -> str:
    """Return the name of a weights file of the model that replaces another one.

    Raises:
        UsageError: a reader would find it by its own name before the index is replaced.
    """
    if replaced.has_index and _NUMBERED.search(name):
        return _NUMBERED.sub(rf"-{stage[:8]}-\1", name)
    if name != replaced.last:
        raise make_unlike_error(url, f"its readers begin with {replaced.last}, and those of the new model with {name}")
    return name


def check_same_file(place: StorePlace, name: str, content: bytes, replaced: Replaced) -> None:
    """Refuse a small file of another content than the one that stays.

    Raises:
        UsageError: it is another, or there is none.
    """
    if name not in replaced.small:
        raise make_unlike_error(place.url, f"it has no {name}, and the new model has")
    if _read(place.store, place.file_key(name))[0] != content:
        raise make_unlike_error(place.url, f"its {name} is another than the new model's")


def check_same_names(url: str, names: Iterable[str], replaced: Replaced) -> None:
    """Refuse a model that lacks small files of the one it replaces.

    Raises:
        UsageError: it does.
    """
    missing = sorted(set(replaced.small) - set(names))
    if missing:
        raise make_unlike_error(url, f"it has {missing[0]}, and the new model has not")


def make_unlike_error(url: str, why: str) -> UsageError:
    """Return the error for a model that a store cannot replace by the new one."""
    return UsageError(
        f"{url}: a store replaces one object at an instant, and more than the weights would change: {why}",
        file=url,
        want="a model whose weights alone are replaced",
        next_step=f"choose another {option('out')}, and move readers to it",
    )


def _read(store: Store, key: str) -> tuple[bytes, str]:
    status = store.head(key)
    return bytes(store.read(key, 0, status.nbytes, status)), status.version
