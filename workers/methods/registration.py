"""Methods defined outside of this project: in a notebook, a script or a module.

`register` adds such a class to `METHODS`. The driver records its module and the digest of its code
in each job, and `load_method` imports the same class in a worker.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import import_module, reload
from typing import Any, TypeVar

from workers.errors import UserError, did_you_mean
from workers.job import StageJob
from workers.methods import METHODS
from workers.methods.base import Method, MethodSettings
from workers.methods.code_digest import code_digest
from workers.plugins import (
    describe_missing_modules,
    find_missing_modules,
    import_plugins,
    load_installed,
)

REGISTERED: dict[str, type[Method[Any]]] = {}  # methods in `METHODS` that `register` added
BROKEN: dict[str, str] = {}  # methods of installed packages that cannot be loaded -> the reason
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # pattern of the names of methods

MethodClass = TypeVar("MethodClass", bound=type[Method[Any]])


def register(method: MethodClass) -> MethodClass:
    """Register a method, so that configs can use its `name`; a decorator that returns the class.

    A class with the same name is replaced, so that a cell of a notebook can be run again.

    Raises:
        UserError: If the class cannot be a method of a config.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(
            f"register: {method!r:.80} is not a method; decorate a class that has "
            "workers.methods.base.Method among its bases"
        )
    name = vars(method).get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise UserError(
            f"register: {method.__name__}.name is {name!r:.80}, and a config names the method by "
            "it; give the class a name of letters, digits, '_', '.' and '-'"
        )
    if name in METHODS and name not in REGISTERED:
        raise UserError(
            f"register: {method.__name__}.name is {name!r}, which is a method of Accrete; "
            "give the class another name"
        )
    settings = method.Settings
    if not (isinstance(settings, type) and issubclass(settings, MethodSettings)):
        raise UserError(
            f"register: {method.__name__}.Settings is {settings!r:.80}; make it a class that has "
            "workers.methods.base.MethodSettings among its bases"
        )
    REGISTERED[name] = method
    METHODS[name] = method
    return method


def load_plugins() -> None:
    """Register the methods of installed packages, and of the modules in ACCRETE_PLUGINS.

    Raises:
        UserError: If a module in ACCRETE_PLUGINS cannot be imported.
    """
    loaded, broken = load_installed()
    BROKEN.update(broken)
    for name, method in loaded.items():
        own_name = getattr(method, "name", name)
        if own_name != name:
            BROKEN[name] = f"its class is named {own_name!r}; give the entry point that name"
            continue
        try:
            register(method)
        except UserError as error:
            BROKEN[name] = str(error)
    import_plugins()


def describe_unknown(name: str) -> str:
    """Return a remedy for a method that this process does not know, for the end of a message."""
    if name in BROKEN:
        return f"the package that defines it cannot be used ({BROKEN[name]})"
    return did_you_mean(name, METHODS, f"there are: {', '.join(sorted(METHODS))}")


def require_plugins(modules: Iterable[str], where: str) -> None:
    """Check that the modules which a file requires are loaded. Nothing is imported.

    Args:
        modules: Names of the modules.
        where: The file, for the message.

    Raises:
        UserError: If a module is not loaded.
    """
    missing = find_missing_modules(modules, (method.__module__ for method in REGISTERED.values()))
    if missing:
        raise UserError(describe_missing_modules(where, missing))


def get_code_digest(name: str) -> str:
    """Return the digest of the code of a registered method; "" for a method of this project.

    The digest is part of the keys of the stages, like `revision`, so that a changed class does not
    reuse old results.
    """
    if name not in REGISTERED:
        return ""
    return code_digest(REGISTERED[name])


def explain_not_importable(name: str) -> str:
    """Return why another process cannot import a method; "" if no obstacle is known."""
    method = REGISTERED.get(name)
    if method is None:
        return ""
    if method.__module__ == "__main__":
        return "its class is defined in a notebook or script"
    if "<locals>" in method.__qualname__:
        return "its class is defined inside a function"
    if getattr(sys.modules.get(method.__module__), "__spec__", None) is None:
        return f"{method.__module__} is not a module that Python imported"
    return ""


def method_module(name: str) -> str:
    """Return the module that workers import to register a method; "" for this project's methods."""
    if name not in REGISTERED:
        return ""
    return REGISTERED[name].__module__


def load_method(job: StageJob) -> type[Method[Any]]:
    """Return the class of a job's method, imported if another process registered it.

    Raises:
        UserError: If this process cannot import the method, or if its code has another digest than
            in the process that started the run.
    """
    if not job.method_code or get_code_digest(job.method) == job.method_code:
        return METHODS[job.method]
    try:
        module = sys.modules.get(job.method_module)
        if module is None:
            import_module(job.method_module)
        elif job.method_module != "__main__":
            # A worker that stays alive between two runs has the class of the first run.
            reload(module)
    except ImportError as error:
        raise UserError(
            f"method {job.method!r} is in the module {job.method_module}, which a worker cannot "
            f"import ({error}); put it on PYTHONPATH, or install it on every node, or set "
            "cluster.workers to 0"
        ) from None
    if get_code_digest(job.method) != job.method_code:
        raise UserError(
            f"method {job.method!r} of the module {job.method_module} differs between this process "
            "and the one that started the run; save the file, restart Python and run again"
        )
    return METHODS[job.method]
