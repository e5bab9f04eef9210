"""Ranks that are on hosts of their own, as far as xrank can tell: they share neither memory nor process numbers."""

import importlib
import sys
from types import ModuleType


def modules_that_ask() -> list[ModuleType]:
    """Return the modules of xrank that ask in which space process numbers are unique."""
    for name in ("loans", "meeting", "memory_messages", "registration", "waits"):
        importlib.import_module(f"xrank.ranks.{name}")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("xrank.")]
    return [module for module in modules if "process_space" in vars(module)]


def move_to_host(name: object, *modules: ModuleType) -> None:
    """Let this process be on another host, for all of xrank's modules, or for these alone."""
    for module in modules or modules_that_ask():
        module.process_space = lambda: f"host {name}"  # type: ignore[attr-defined]
