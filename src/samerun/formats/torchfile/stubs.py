"""The restricted unpickler: whatever a pickle names is a stub that remembers what was done to it, and does nothing."""

from __future__ import annotations

import pickle
from typing import Any


class Locked(type):
    """Metaclass of stubs. A pickle may ask to set attributes on anything it can name; on a class it must not."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("a stub's class cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise TypeError("a stub's class cannot be changed")


class Stub(metaclass=Locked):
    """Remembers how a value was built. Its class stands for the name; calling the class is what REDUCE does."""

    qualified_name = ""

    def __new__(cls, *args: Any, **named: Any) -> Stub:
        stub = object.__new__(cls)
        vars(stub).update(args=args, named=named, state=None, items=[], pairs=[])
        return stub

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state

    def append(self, item: Any) -> None:
        vars(self)["items"].append(item)

    add = append

    def extend(self, items: Any) -> None:
        vars(self)["items"].extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self)["pairs"].append((key, value))


class Persistent:
    """A reference that the file resolves itself: a storage."""

    __slots__ = ("identity",)

    def __init__(self, identity: Any) -> None:
        self.identity = identity


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves every name to a stub class; subclasses may add cheaper stubs of their own for known names."""

    def __init__(self, file: Any, known: dict[tuple[str, str], Any] | None = None) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._stubs: dict[tuple[str, str], Any] = dict(known or {})

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = (module_name, global_name)
        found = self._stubs.get(name)
        if found is None:
            found = self._nested if name in _GETATTR else _shared_stub(name) or _new_stub(name)
            self._stubs[name] = found
        return found

    def _nested(self, owner: Any, inner: Any) -> Any:
        """Stands in for `getattr`, by which a pickle names a class inside a class, or a method of an object.

        Returns that class's stub, and for a method a record of the call.
        """
        outer = str(getattr(owner, "qualified_name", "")) if isinstance(owner, Locked) else ""
        if not outer or not isinstance(inner, str) or not inner.isidentifier() or ":" in outer:
            return _ATTRIBUTE(owner, inner)
        return self._stubs.setdefault((outer, inner), _new_stub((f"{outer}:", inner)))

    def persistent_load(self, pid: Any, /) -> Any:
        return Persistent(pid)


_GETATTR = frozenset({("builtins", "getattr"), ("__builtin__", "getattr")})


def _new_stub(name: tuple[str, str]) -> type[Stub]:
    module = "builtins" if name[0] == "__builtin__" else name[0]  # protocols 0 to 2 keep Python 2's name
    return Locked("Stub", (Stub,), {"qualified_name": f"{module}.{name[1]}"})  # pyright: ignore[reportReturnType]


_ATTRIBUTE = _new_stub(("builtins", "getattr"))
_shared: dict[tuple[str, str], type[Stub]] = {}


def _shared_stub(name: tuple[str, str]) -> type[Stub] | None:
    """Returns the one stub class of a name that torch.save files use again and again, made on first use."""
    if name[0] not in _COMMON_MODULES or (name not in _shared and len(_shared) > 500):
        return None
    return _shared.setdefault(name, _new_stub(name)) if name not in _shared else _shared[name]


_COMMON_MODULES = frozenset({"torch", "torch._utils", "collections", "numpy", "numpy.core.multiarray", "builtins"})
