"""Uploads model folders to the Hub by huggingface_hub: its uploads go on where they stopped, and a commit is atomic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xrank.environment import environ
from xrank.errors import AGAIN, OutputExistsError, UsageError, XrankError, option
from xrank.storage.client import StoreSettings, import_hub
from xrank.storage.manifest import MANIFEST_NAME, read_manifest
from xrank.storage.output_place import ATTESTATION_NAME, SIGNATURE_NAME
from xrank.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_CARD = "README.md"


def repository_name(text: str) -> str:
    """Return ``org/name`` of a repository; ``hf://org/name`` names it, too. UsageError for other names."""
    name = text.removeprefix("hf://").strip("/")
    if name.count("/") != 1 or "@" in name:
        next_step = f"give {option('push_to_hub')} the owner and the name of a model"
        raise UsageError(f"{text} is not a repository of the Hub", got=text, want="org/name", next_step=next_step)
    return name


def check_repository(repository: str, *, overwrite: bool) -> None:
    """Refuse a repository that cannot take a model, before the model is made. Writes nothing.

    OutputExistsError if a model is there, and `overwrite` is not given; UsageError if huggingface_hub or the token is
    missing, or the Hub is reached over plain http; XrankError if it does not answer.
    """
    with _explained(repository):
        api = _open_hub(repository)
        api.whoami()
        _look_at(api, repository, overwrite=overwrite)


def push_folder(folder: str, repository: str, *, overwrite: bool) -> str:
    """Upload a model folder that xrank wrote, in one commit; return the commit's URL.

    A repository that is not there is made, private. Files that the Hub has already are not sent again. The commit fails
    if another one came in between (OutputExistsError). Where a model may be replaced, its other weights are deleted in
    the same commit. After an XrankError the same command goes on.
    """
    manifest = read_manifest(os.path.join(folder, MANIFEST_NAME))
    names = [one["name"] for one in (*manifest["files"], *manifest["companions"])] + [MANIFEST_NAME]
    names += [name for name in (SIGNATURE_NAME, ATTESTATION_NAME) if os.path.lexists(os.path.join(folder, name))]
    card = card_text(repository, manifest)
    with _explained(repository, folder):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api = _open_hub(repository)
        api.create_repo(repository, private=True, exist_ok=True)
        there, head = _look_at(api, repository, overwrite=overwrite)
        operations: list[Any] = [CommitOperationAdd(name, os.path.join(folder, name)) for name in names]
        if _CARD not in there:
            operations.append(CommitOperationAdd(_CARD, card.encode()))
        gone = sorted(name for name in there if name.endswith(_WEIGHTS) and name not in names)
        operations += [CommitOperationDelete(name) for name in gone]
        done = api.create_commit(
            repository,
            operations,
            commit_message=f"Upload a model gathered by xrank {__version__}",
            commit_description=card.partition("\n---\n")[2].strip(),
            parent_commit=head,
        )
    return str(done.commit_url)


def card_text(repository: str, manifest: Mapping[str, Any]) -> str:
    """Return a model card: source, step, and the digests of all files."""
    source = manifest["source"]
    facts = [f"format {source['format']}"]
    facts += [f"step {source['step']}"] if source.get("step") is not None else []
    facts += [f"written by {source['world_size']} ranks"] if source.get("world_size") else []
    facts += [f"run {source['run_id']}"] if source.get("run_id") else []
    files = (*manifest["files"], *manifest["companions"])
    rows = "".join(f"| `{one['name']}` | {one['nbytes']:,} | `{one['digest']}` |\n" for one in files)
    return (
        f"---\ntags:\n- xrank\n---\n# {repository.partition('/')[2]}\n\n"
        f"[xrank](https://pypi.org/project/xrank/) {__version__} gathered this model from a checkpoint: "
        f"{', '.join(facts)}. Every element of its {len(manifest['tensors']):,} tensors was proven to come from the "
        f"checkpoint exactly once.\n\n| File | Bytes | Digest |\n| --- | ---: | --- |\n{rows}\n"
        f"`xrank verify FOLDER` compares a copy with `{MANIFEST_NAME}`.\n"
    )


def _open_hub(repository: str) -> HfApi:
    settings = StoreSettings.from_environment(environ())
    api: HfApi = import_hub(f"hf://{repository}", f"an upload to {repository}", settings).HfApi()
    return api


def _look_at(api: HfApi, repository: str, *, overwrite: bool) -> tuple[set[str], str | None]:
    """Return the files of a repository and its last commit; none where there is no such repository."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repository)
    except RepositoryNotFoundError:
        return set(), None
    there = {one.rfilename for one in info.siblings or ()}
    model = sorted(name for name in there if name.endswith(_WEIGHTS) or name == MANIFEST_NAME)
    if model and not overwrite:
        url, what = f"hf://{repository}", f"hf://{repository}: already contains a model ({model[0]})"
        next_step = f"choose another repository, or add {option('overwrite', True)} to replace the model"
        raise OutputExistsError(what, file=url, next_step=next_step)
    return there, info.sha


@contextmanager
def _explained(repository: str, folder: str | None = None) -> Iterator[None]:
    """Raise errors of huggingface_hub as xrank's; their texts may contain URLs, so only their kinds are kept.

    The model is whole in the folder, and waits for the next upload.
    """
    try:
        yield
    except (XrankError, ImportError):
        raise
    except Exception as error:
        # huggingface_hub wraps the failure of one file's upload.
        answers = [getattr(one, "response", None) for one in (error, error.__cause__)]
        number = next((answer.status_code for answer in answers if answer is not None), None)
        got = " ".join(map(str, filter(None, (number, type(error).__name__))))
        url = f"hf://{repository}"
        waiting = "" if folder is None else f"; the complete model is in {folder}"
        kind, what = XrankError, f"{url} could not be written"
        next_step = f"check the network; then {AGAIN}, which sends what the Hub does not have yet"
        if number in (401, 403) or type(error).__name__ == "LocalTokenNotFoundError":
            kind, what = UsageError, f"{url} may not be written"
            next_step = "set HF_TOKEN to a token that may write there, or run hf auth login"
        elif number in (409, 412):
            kind, what = OutputExistsError, f"{url}: someone else has committed meanwhile"
            next_step = f"stop the other program that writes there; then {AGAIN}"
        raise kind(what, file=url, got=got, next_step=next_step + waiting) from None
