"""Environment variables: xrank's own settings, Hugging Face's cache.

This is the only module that reads os.environ. Functions here take the mapping, so that a test (or a simulation of eight
ranks in one process) passes its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SETTINGS = (
    "XRANK_WORKSPACE",
    "XRANK_MAX_MEMORY",
    "XRANK_WORKERS",
    "XRANK_TIMEOUT",
    "XRANK_RUN_ID",
    "XRANK_ALLOW_HTTP",
    "XRANK_STORE_CONNECTIONS",
    "XRANK_STORE_TIMEOUT",
)
"""xrank's own variables: defaults of the options of these names, one run id for all ranks, and requests to stores."""


def environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def scratch_folder(environ: Mapping[str, str]) -> str:
    """Return the folder for large temporary files: TMPDIR, or /var/tmp, as /tmp may be memory (file-hierarchy(7))."""
    return environ.get("TMPDIR") or "/var/tmp"  # noqa: S108  files in it have no name


def forgo_blas_threads() -> None:
    """Let numpy load without matrix threads, unless the environment sets their number; call it before numpy loads.

    OpenBLAS starts a thread for each core, which spins before it sleeps: on two cores, a quarter of a small run's
    processor time. No command multiplies matrices; programs that import xrank may, so only ``xrank`` itself calls this.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def permit_http() -> None:
    """Let requests of this process and its children go over plain http, as ``--allow-http`` asks."""
    os.environ["XRANK_ALLOW_HTTP"] = "1"


def setting(environ: Mapping[str, str], name: str) -> str | None:
    """Return one of xrank's own settings; an empty variable counts as unset."""
    if name not in SETTINGS:
        raise KeyError(name)
    return environ.get(name) or None


def hub_cache(environ: Mapping[str, str]) -> str:
    """Return the folder where Hugging Face keeps downloaded models (huggingface_hub ``constants.py``)."""
    if cache := environ.get("HF_HUB_CACHE"):
        return os.path.expanduser(cache)
    if home := environ.get("HF_HOME"):
        return os.path.join(os.path.expanduser(home), "hub")
    above = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(os.path.expanduser(above), "huggingface", "hub")


def list_cached_models(environ: Mapping[str, str]) -> list[str]:
    """Return the IDs of models in Hugging Face's cache (huggingface_hub: ``models--owner--name``)."""
    try:
        names = os.listdir(hub_cache(environ))
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/") for name in names if name.startswith("models--"))
