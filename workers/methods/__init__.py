"""The registry of methods, which are found in the modules of this package."""

from importlib import import_module
from pkgutil import iter_modules

from workers.methods.base import Method

METHODS: dict[str, type[Method]] = {}  # by name; filled below, because registration.py imports it


def find_methods() -> dict[str, type[Method]]:
    """Import the modules of this package and return their methods by name.

    A method is a subclass of `Method` that sets `name`. Subpackages such as `bases` define no
    methods and are skipped.
    """
    methods: dict[str, type[Method]] = {}
    for info in iter_modules(__path__):
        if info.ispkg:
            continue
        module = import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            is_method = isinstance(value, type) and issubclass(value, Method)
            if is_method and value.__module__ == module.__name__ and "name" in vars(value):
                methods[value.name] = value
    return dict(sorted(methods.items()))


METHODS.update(find_methods())


def load_others() -> None:
    """Add the methods of installed packages and of the modules in ACCRETE_PLUGINS.

    This happens last, because those packages import this one.
    """
    from workers.methods.registration import load_plugins

    load_plugins()


load_others()
