"""Plugins: third-party modules that define methods.

Loading such a module runs its code with the rights of this process. It is loaded only if it belongs
to an installed package with an entry point in the group `accrete.methods`, or if `--plugin` or the
variable ACCRETE_PLUGINS names it. A config, a run record or a bundle can name the modules that it
requires, but never causes one to be loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from workers.errors import UserError

ENTRY_POINT_GROUP = "accrete.methods"
VARIABLE = "ACCRETE_PLUGINS"  # modules, separated by commas; worker processes inherit it
MODULE_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"  # regular expression of a dotted module name


def list_plugins() -> list[str]:
    """Return the modules that ACCRETE_PLUGINS names."""
    return [name for name in re.split(r"[,\s]+", os.environ.get(VARIABLE, "")) if name]


def add_plugin(module: str) -> None:
    """Add a module to ACCRETE_PLUGINS. The module is not imported yet.

    The folder that contains its top-level package is added to `sys.path` and `PYTHONPATH`, so that
    this process and its children find the module. It is the current folder if Python does not find
    the package.

    Raises:
        UserError: If `module` is not a valid module name.
    """
    if module.endswith(".py") or not re.fullmatch(MODULE_NAME, module, re.ASCII):
        remedy = "give the name by which Python imports it, as in my_package.methods"
        if module.endswith(".py"):
            remedy = f"leave .py out: {re.sub(r'/+', '.', module[:-3]).lstrip('.')}"
        raise UserError(f"plugin {module!r:.80} is not a valid module name; {remedy}")
    if module not in list_plugins():
        os.environ[VARIABLE] = ",".join([*list_plugins(), module])
    folder = _find_folder(module.partition(".")[0])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in (*paths, sysconfig.get_path("purelib")):
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, folder])
    if folder not in sys.path:
        sys.path.append(folder)


def _find_folder(package: str) -> str:
    """Return the folder that contains a package or module.

    It is the current folder if Python does not find the module.
    """
    spec = find_spec(package)
    if spec is None:
        return os.getcwd()
    if spec.submodule_search_locations:
        return os.path.dirname(os.path.abspath(spec.submodule_search_locations[0]))
    return os.path.dirname(os.path.abspath(spec.origin or ""))


def import_plugins() -> None:
    """Import the modules that ACCRETE_PLUGINS names; they register their methods.

    Raises:
        UserError: If a module cannot be imported.
    """
    for module in list_plugins():
        try:
            import_module(module)
        except UserError:
            raise
        except ModuleNotFoundError as error:
            raise UserError(
                f"plugin {module!r:.80} cannot be imported ({error}); install its package, or put "
                "its folder on PYTHONPATH"
            ) from None
        except Exception as error:
            raise UserError(
                f"plugin {module!r:.80} cannot be imported ({type(error).__name__}: {error}); fix "
                "the module"
            ) from error


def load_installed() -> tuple[dict[str, Any], dict[str, str]]:
    """Load the entry points of installed packages in the group `accrete.methods`.

    A package that fails to load raises no error, because the other methods do not need it.

    Returns:
        The loaded objects, and the reasons for failures, both by the name of the entry point.
    """
    loaded: dict[str, Any] = {}
    broken: dict[str, str] = {}
    values: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if values.setdefault(entry.name, entry.value) != entry.value:
            broken[entry.name] = (
                f"two packages define this entry point, {values[entry.name]} and {entry.value}; "
                "uninstall one"
            )
            loaded.pop(entry.name, None)
            continue
        try:
            loaded[entry.name] = entry.load()
        except Exception as error:
            broken[entry.name] = (
                f"{entry.value} cannot be imported: {type(error).__name__}: {error}; fix or "
                "uninstall its package"
            )
    return loaded, broken


def find_missing_modules(required: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the required modules that are not loaded, judged by their top-level package.

    The modules in ACCRETE_PLUGINS count as loaded.

    Args:
        required: Names of modules, from a file.
        known: Modules of the methods that this process knows.
    """
    packages = {name.partition(".")[0] for name in (*known, *list_plugins())}
    return [name for name in required if name.partition(".")[0] not in packages]


def describe_missing_modules(where: str, modules: Iterable[str]) -> str:
    """Return the error message about a file that requires modules which are not loaded."""
    names = list(modules)
    flags = " ".join(f"--plugin {name}" for name in names)
    return (
        f"{where}: it needs methods of {', '.join(map(repr, names))}, which this process has not "
        "loaded. Loading a module runs its code, so a file cannot do it; if you trust the module, "
        f"install its package, or run accrete {flags} COMMAND"
    )


def describe_package(module: str) -> dict[str, str]:
    """Return the name and version of the installed package of a module, or an empty dict."""
    root = module.partition(".")[0]
    for name in importlib.metadata.packages_distributions().get(root, []):
        return {"package": name, "version": importlib.metadata.version(name)}
    return {}
