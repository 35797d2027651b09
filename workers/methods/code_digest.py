"""A digest of the code of a class defined outside of this project.

The digest of a method that a user registered is part of the keys of its stages
(`registration.get_code_digest`), so that changed code does not reuse old results. The entry point
is `code_digest`.

It covers the class, its bases, and the functions, classes and values that its functions refer to.
Code is included if it belongs to the package of the class, or to a module that is not part of this
project, not in the standard library, and not an installed package. Other definitions are included
by name only.

Not included are comments, file names, line numbers, attributes that the `repr` of an object of
another package does not show, special attributes of classes that are not functions (for example
`__doc__` and `__slots__`), and the text of the docstrings of functions. Definitions inside a
function are an exception: their docstrings are included. The digest also changes if a docstring is
added to a function or removed.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

PROJECT = ("pipeline", "workers")
PACKAGE_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
NOT_CODE = ("_abc_impl",)  # entries of a class namespace that are not code: caches of `abc`
READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")  # bytecode instructions that read a global
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # a memory address in the repr of an object


def code_digest(value: type[Any]) -> str:
    """Return 16 hexadecimal digits that change if the code of a class changes.

    They also change with the minor version of Python, because its bytecode differs.
    """
    digest = _CodeDigest(_find_root(value.__module__))
    digest.add("class", value)
    return digest.text()


def _find_root(module: str) -> str:
    return module.partition(".")[0]


class _CodeDigest:
    """Hashes values one after another; each class and function is hashed once.

    Args:
        package: Top-level package whose code is always included.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.hash = hashlib.sha256()
        self.definitions: set[Any] = set()  # classes and functions that are hashed already
        self.containers: list[Any] = []  # containers that enclose the current value

    def text(self) -> str:
        """Return the digest of all values so far."""
        return self.hash.hexdigest()[:16]

    def add(self, name: str, value: Any) -> None:
        """Add a value under a name, with all its parts."""
        self._note(name, type(value).__qualname__)
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                self._note(repr(value))
            case CodeType():
                self._add_code(value)
            case type() | FunctionType():
                self._add_definition(value)
            case ModuleType():
                self._note(value.__name__)
            case Mapping() | list() | tuple() | set() | frozenset():
                self._add_container(value)
            case Tensor() | ndarray():
                self._add_array(value)
            case _:
                self._add_object(value)
        self._note(")")  # so that `[[1], 2]` and `[[1, 2]]` differ

    def _note(self, *parts: str) -> None:
        """Add texts to the hash, each preceded by its length."""
        for part in parts:
            self.hash.update(f"{len(part)}:{part};".encode())

    def _add_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            self.add(str(key), value)

    def _add_container(self, value: Any) -> None:
        if any(value is container for container in self.containers):
            return  # the container contains itself: without this check the recursion would not end
        self.containers.append(value)
        if isinstance(value, Mapping):
            items = [(_describe(key), item) for key, item in value.items()]
            self._add_items(sorted(items, key=lambda item: item[0]))
        elif isinstance(value, (set, frozenset)):
            self._add_items(enumerate(sorted(value, key=_describe)))
        else:
            self._add_items(enumerate(value))
        self.containers.pop()

    def _add_array(self, values: Tensor | ndarray[Any, Any]) -> None:
        """Add a tensor or an array. Its `repr` would abbreviate many values."""
        self._note(str(values.dtype), str(tuple(values.shape)))
        if isinstance(values, Tensor):
            values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if values.dtype.hasobject:
            self.add("values", values.tolist())
        else:
            self.hash.update(values.tobytes())

    def _add_definition(self, value: Any) -> None:
        """Add the name of a class or function, and its code, or its module if code is excluded."""
        module = str(value.__module__ or "")
        self._note(value.__qualname__)
        if not self._is_included(module):
            self._note(module)
            return
        if value in self.definitions:
            return
        self.definitions.add(value)
        if isinstance(value, type):
            self._add_class(value)
        else:
            self._add_function(value)

    def _is_included(self, module: str) -> bool:
        """Return whether the code of a module is hashed, instead of only the names it defines."""
        root = _find_root(module)
        if root == self.package:
            return True
        if root in PROJECT or root in sys.stdlib_module_names:
            return False
        file = getattr(sys.modules.get(module), "__file__", None)
        return file is None or not file.startswith(PACKAGE_FOLDERS)

    def _add_class(self, value: type[Any]) -> None:
        self._add_items(enumerate(value.__bases__))
        for name, member in sorted(vars(value).items()):
            is_dunder = name.startswith("__") and name.endswith("__")
            is_code = isinstance(member, (FunctionType, staticmethod, classmethod))
            if name not in NOT_CODE and (not is_dunder or is_code):
                self.add(name, member)

    def _add_function(self, function: FunctionType) -> None:
        self.add("defaults", function.__defaults__)
        self.add("keyword defaults", function.__kwdefaults__)
        for cell in function.__closure__ or ():
            self.add("closure", _read_cell(cell))
        self._add_code(function.__code__, function.__doc__)
        for name in _list_used_names(function.__code__, READS_GLOBAL):
            if name in function.__globals__:
                self._add_global(name, function.__globals__[name], function.__code__)

    def _add_global(self, name: str, value: Any, code: CodeType) -> None:
        """Add a global that `code` reads.

        If it is a module whose code is included, also add its attributes whose names occur in
        `code`.
        """
        self.add(name, value)
        if not isinstance(value, ModuleType) or not self._is_included(value.__name__):
            return
        for attribute in _list_used_names(code):
            if attribute in vars(value):
                self.add(f"{name}.{attribute}", vars(value)[attribute])

    def _add_code(self, code: CodeType, docstring: str | None = None) -> None:
        """Add compiled code. `docstring` is skipped if it is the first constant."""
        self._note(code.co_code.hex(), str(code.co_flags), code.co_exceptiontable.hex())
        self._note(*code.co_names, "", *code.co_varnames, "", *code.co_freevars, *code.co_cellvars)
        constants = list(code.co_consts)
        if docstring is not None and constants[:1] == [docstring]:
            del constants[0]
        self._add_items(enumerate(constants))

    def _add_object(self, value: Any) -> None:
        """Add an object: the functions that it wraps, else its class, its repr and its attributes.

        Attributes of objects whose class is in another package are not added.
        """
        wrapped = _unwrap(value)
        if wrapped:
            self._add_items(enumerate(wrapped))
            return
        self.add("class", type(value))
        self._note(_describe(value))
        attributes = getattr(value, "__dict__", {})
        if attributes and self._is_included(str(type(value).__module__)):
            self._add_container(attributes)


def _describe(value: Any) -> str:
    """Return the `repr` of a value without addresses, which differ between processes."""
    return ADDRESS.sub("", repr(value))


def _unwrap(value: Any) -> list[Any]:
    """Return the functions that an object wraps, and the arguments of a partial. Can be empty."""
    match value:
        case property():
            return [value.fget, value.fset, value.fdel]
        case classmethod() | staticmethod():
            return [value.__func__]
        case functools.cached_property():
            return [value.func]
        case functools.partial():
            return [value.func, value.args, value.keywords]
    function: Callable[..., Any] | None = getattr(value, "__wrapped__", None)
    return [] if function is None else [function]


def _read_cell(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function, or None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _list_used_names(code: CodeType, instructions: tuple[str, ...] = ()) -> list[str]:
    """Return the sorted names that code uses, including functions inside it.

    Args:
        code: The code.
        instructions: Bytecode instructions; only names that they read are returned. Empty: all
            names.
    """
    names = set(code.co_names)
    if instructions:
        used = [each for each in dis.get_instructions(code) if each.opname in instructions]
        names = {str(each.argval) for each in used}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_list_used_names(constant, instructions))
    return sorted(names)
