"""Names for the parts of a config: `engine=vllm` is the same as `engine=VLLMEngineBuilder`.

A part is imported only when it is chosen.
"""

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import chz
import chz.factories
from chz.tiepin import CastError

from es_cookbook.common.configs import NOT_RECORDED
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.registry import Registered, distribution_of, parts
from es_cookbook.common.trust import load, typed

_Class = TypeVar("_Class")
_T = TypeVar("_T")


class Names(chz.factories.standard):
    """The names by which a user chooses a part of a config.

    Beside the names, the class's own name, any subclass that is already defined, and "module:Class"
    are accepted. Only what is chosen is imported, so a name may point to a module that needs an
    optional package. `field` declares a field for such a part.

    Args:
        accepted: name -> "module:Class".
        default: name that is used when none is given, or None for none.
        settings: name -> fields in which that choice differs from its class's own defaults; they
            hold on the command line and for `build_default` alike. `settings_of` may have more.
        functions: whether a function, "my_module:name" or "path/to/script.py:name", is a value too.

    Attributes:
        is_optional: the part is None until it is chosen.
    """

    def __init__(
        self,
        accepted: Mapping[str, str],
        default: str | None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
        *,
        functions: bool = False,
    ) -> None:
        super().__init__()
        self._accepted, self._settings, self._functions = accepted, settings or {}, functions
        self.default, self.is_optional = default, False

    @property
    def accepted(self) -> Mapping[str, str]:
        """Name -> "module:Class", as far as is known now; the default first."""
        return dict(sorted(self._accepted.items(), key=lambda item: item[0] != self.default))

    def field(self, doc: str = "", *, optional: bool = False) -> Any:  # noqa: ANN401  (as chz.field)
        """Return a config's field for such a part, with the default, or None if there is none.

        An `optional` part is None until it is chosen; on the command line, giving it a field alone
        chooses the default (`es_cookbook.common.cli`). While it is None a config does not record
        it: other installations may lack the part.
        """
        self.is_optional = optional
        metadata = {NOT_RECORDED: optional}
        return chz.field(
            meta_factory=self, default_factory=self.build_default, doc=doc, metadata=metadata
        )

    def build_default(self) -> object:
        """Build the default part; None if there is none."""
        factory = self.unspecified_factory()
        return None if factory is None else factory()

    def unspecified_factory(self) -> Callable[..., object] | None:
        """Return the factory that chz calls if the part is not given, or only fields of it.

        chz asks for it in any case, so an optional part, which need not be imported, has none.
        """
        if self.default is None or self.is_optional:
            return None
        return self._with_settings(load(self._accepted[self.default]), self.default)

    def from_string(self, factory: str) -> Callable[..., object]:
        """Return the class (or partial of it) that a user's word stands for.

        Raises:
            MetaFromString: None of that name, and lists what is accepted, the nearest first; or it
                cannot be imported.
        """
        asked = self.default if self.is_optional and factory in ("True", "true") else factory
        try:
            for name, target in self.accepted.items():
                if asked in (name, target, target.partition(":")[2]):
                    return self._with_settings(load(target), name)
            return self._with_settings(super().from_string(factory), None)
        except ConfigError as error:
            raise chz.factories.MetaFromString(str(error)) from error
        except chz.factories.MetaFromString as error:
            hint = str(error) if ":" in factory else nearest(factory, self.accepted)
            if self._functions:
                hint += ", and functions as my_module:name or path/to/script.py:name"
            raise chz.factories.MetaFromString(f"unknown name {factory!r}: {hint}") from error

    def settings_of(self, part: Callable[..., object], name: str | None) -> Mapping[str, object]:
        """Return the fields in which a choice differs from its class's own defaults.

        `name` is the one by which it was chosen, None for a class that has none.
        """
        del part
        return self._settings.get(name or "", {})

    def perform_cast(self, value: str) -> object:
        """Return None or a function if the word stands for one; all other words are names."""
        optional = type(None) in typing.get_args(self.field_annotation)
        if optional and value in ("None", "none") and value not in self.accepted:
            return None
        if self._functions and ":" in value and not isinstance(found := typed(value), type):
            return found
        raise CastError(f"{value!r} is a name")

    def _with_settings(
        self, loaded: Callable[..., object], name: str | None
    ) -> Callable[..., object]:
        settings = self.settings_of(loaded, name)
        return functools.partial(loaded, **settings) if settings else loaded


def with_each(
    registered: Registered, kind: type, what: str, *, optional: bool = True
) -> Callable[[type[_Class]], type[_Class]]:
    """Return a decorator, used under `chz.chz`, that adds a field for each registered part.

    Args:
        registered: the group.
        kind: the base class of the parts.
        what: a word for a part, for the documentation of the fields.
        optional: whether a part is off until it or one of its options is given.
    """

    def decorated(config: type[_Class]) -> type[_Class]:
        own = f"{config.__module__}:{config.__qualname__}"
        for name, (part, *_) in parts(registered.group).items():
            if name.isidentifier() and not hasattr(config, name) and part.value != own:
                names = Names({name: part.value}, default=name)
                doc = f"the {what} {name} of {distribution_of(part).name}; None leaves it out"
                setattr(config, name, names.field(doc, optional=optional))
                config.__annotations__[name] = kind | None
        return config

    return decorated


def built_field(builder: Callable[..., _T], doc: str = "", **settings: object) -> _T:
    """Return a config's field for a part with other defaults (`settings`) than its class."""
    factory = functools.partial(builder, **settings) if settings else builder
    return chz.field(default_factory=factory, blueprint_unspecified=factory, doc=doc)
