"""The fields of :mod:`spectune.settings` as options, keys and keywords, and where their values
stand: what is typed wins over the environment, which wins over ``spectune.toml``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from spectune.settings import FILE, TYPED, WHERE, File, Group, OptionKind, Settings
from spectune.traces.errors import ConfigError
from spectune.traces.files import read_text
from spectune.traces.text import shortened

PATHS = ("pair", "target", "drafts", "workload", "db", "load.arrivals")
"""Keys whose values are relative to the file that they stand in, if they are no URL."""
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Option:
    """A field of a model or of one of its groups. ``hidden``: ``--set`` says it."""

    key: str
    field: FieldInfo
    default: Any
    name: str
    env: str
    hidden: bool
    argument: bool
    positional: bool
    acts: tuple[str, ...] = ()

    @property
    def keyword(self) -> str:
        """Its name in Python."""
        name = self.name.replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    @property
    def kind(self) -> OptionKind:
        """What its values look like."""
        kinds = (self.field, self.field.annotation, *get_args(self.field.annotation))
        for kind in kinds:
            metadata: Any = getattr(kind, "metadata", ()) or getattr(kind, "__metadata__", ())
            for item in metadata:
                if isinstance(item, OptionKind):
                    return item
        if choices := [c for k in kinds if get_origin(k) is Literal for c in get_args(k)]:
            return OptionKind("|".join(choices))
        texts = " ".join(map(str, kinds[1:]))
        if "bool" in texts:
            return OptionKind("true|false")
        return OptionKind("NUMBER" if "float" in texts else "N" if "int" in texts else "TEXT")

    @property
    def default_text(self) -> str:
        """The default for people; empty where there is none."""
        if self.default is None or self.default in ((), {}):
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, float):
            return f"{self.default:g}{'s' * (self.kind.metavar == 'TIME')}"
        return str(self.default)

    @property
    def spelled(self) -> str:
        """As a user types it."""
        if self.argument:
            return self.key.upper()
        if self.hidden:
            return f"--set {self.key}"
        return f"--{'no-' * (self.default is True)}{self.name}"


def options_of(model: type[BaseModel]) -> dict[str, Option]:
    """The fields of a model, and after them those of its groups, by their key; those of Python
    alone left out."""
    options: dict[str, Option] = {}
    grouped: dict[str, Option] = {}
    for name, field in model.model_fields.items():
        key, extra = name.rstrip("_"), field.json_schema_extra
        if isinstance(inner := field.annotation, type) and issubclass(inner, Group):
            shown: Any = extra["options"] if isinstance(extra, dict) else ()
            for inner_name, inner_field in inner.model_fields.items():
                default = getattr(field.default, inner_name)
                hidden = inner_name not in shown
                one = _option(f"{key}.", inner_name, inner_field, default, hidden, inner.acts)
                grouped[one.key] = one
        elif isinstance(extra, dict):
            default = None if field.is_required() else field.default
            options[key] = _option("", name, field, default, bool(extra["hidden"]))
    return options | grouped


def _option(
    prefix: str, name: str, field: FieldInfo, default: Any, hidden: bool, acts: str = ""
) -> Option:
    extra: Any = field.json_schema_extra
    key = name.rstrip("_")
    return Option(
        prefix + key,
        field,
        default,
        extra["option"] or key.replace("_", "-"),
        extra["env"],
        hidden,
        extra["argument"],
        extra["positional"],
        tuple(extra["acts"] or acts.split()),
    )


def unknown(name: str, names: Iterable[str], what: str) -> ConfigError:
    """The error for a name that there is not, with the nearest that there is."""
    group, _, last = name.rpartition(".")
    every = sorted(names, key=lambda n: (n.rpartition(".")[0] == group, n))
    by_last = {n.rpartition(".")[2]: n for n in every}  # of equal ones that of the same group
    near = get_close_matches(last, by_last, n=1)
    hint = f"did you mean {by_last[near[0]]!r}?" if near else f"there are: {', '.join(every)}"
    return ConfigError(f"unknown {what} {shortened(name)!r}; {hint}")


# ------------------------------------------------------------------------------- where values stand


class Config(NamedTuple):
    """A file of defaults, and its values by key."""

    file: Path
    values: Mapping[str, Any]


def read_config(file: str | None) -> Config | None:
    """The values of a file; by default of SPECTUNE_CONFIG's, else of the working folder's where
    there is one. Raises ConfigError."""
    file = file or os.environ.get("SPECTUNE_CONFIG")
    if file is None and not os.path.exists(FILE):
        return None
    path = Path(file or FILE)
    text = read_text(path, str(path), ConfigError)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        values = dict(_flat(document, File))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    from_document(File, document, str(path))
    for key in PATHS:
        if isinstance(value := values.get(key), list):
            values[key] = [_named_from(path.parent, str(name)) for name in value]
        elif isinstance(value, dict):
            values[key] = {name: _from(path.parent, str(one)) for name, one in value.items()}
        elif key == "load.arrivals" and ".csv" not in str(value):
            continue  # no file
        elif value is not None:
            values[key] = _from(path.parent, str(value))
    return Config(path, values)


def _named_from(folder: Path, name: str) -> str:
    """A path, or ``NAME=PATH``, as seen from the working folder."""
    before, equals, path = name.rpartition("=")
    return f"{before}{equals}{_from(folder, path)}"


def _from(folder: Path, name: str) -> str:
    """A path as seen from the working folder; ``demo`` and URLs as they are."""
    return name if name == "demo" or ":" in name else str(folder / name)


def _flat(document: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[Any]:
    """(key, value) of a nested document. Raises ConfigError for a group that is no table."""
    for name, value in document.items():
        field = model.model_fields.get(name)
        group = None if field is None else field.annotation
        if isinstance(group, type) and issubclass(group, Group):
            if isinstance(value, Group):
                value = value.model_dump(exclude_unset=True)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}: a table is expected: [{name}], its keys below it")
            yield from _flat(value, group, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def from_keywords(model: type[Settings], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key of Python's keywords: options' names, and groups with a mapping. Raises
    ConfigError."""
    keys = {option.keyword: key for key, option in options_of(model).items()}
    keys |= {name: name for name, field in model.model_fields.items() if field.exclude}
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in keys:
            values[keys[name]] = value
        elif name in model.model_fields:
            values |= dict(_flat({name: value}, model))
        else:
            raise unknown(name, keys, "argument")
    return values


def from_document(model: type[S], document: Mapping[str, Any], where: str) -> S:
    """Settings that stand in a document. Raises ConfigError with the first thing that is wrong."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        key, first = _first(error)
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{where}: {unknown(key, options_of(model), 'key')}") from None
        raise ConfigError(f"{where}: {key}: {_reason(first)}") from None


def settings_of(
    model: type[S], typed: Mapping[str, Any], config: Config | None, *, python: bool = False
) -> S:
    """The settings of a command, of values that are typed (by key), the environment and the file.
    Raises ConfigError that names option, variable or file and key."""
    options = options_of(model)
    values, sources = dict(typed), dict.fromkeys(typed, TYPED)
    for key, option in options.items():
        if key in typed:
            continue
        if option.env and os.environ.get(option.env):
            sources[key], values[key] = option.env, os.environ[option.env]
        elif config is not None and key in config.values:
            sources[key], values[key] = f"{config.file}: {key}", config.values[key]
    document: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        inner = document
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    try:
        settings = model.model_validate(document)
    except ValidationError as error:
        path, first = _first(error)
        key = next((k for k in (path, *_parents(path)) if k in options), path)
        if first["type"] == "missing":
            raise ConfigError(f"{options[key].spelled} is needed") from None
        if first["type"] == "extra_forbidden":
            raise unknown(key, options, "key") from None
        source = sources.get(key, key)
        if source == TYPED and key in options:
            source = options[key].keyword if python else options[key].spelled
        raise ConfigError(f"{source}: {_reason(first)}") from None
    settings._sources = sources
    settings._file = None if config is None else str(config.file)
    return settings if python else settings.as_meant()


def typed_words(
    settings: Settings, model: type[Settings], without: Collection[str] = ()
) -> list[str]:
    """The options typed, as words of another command that takes them too (``model``): but for its
    arguments, the database, and the keys of ``without``. Values that only Python can give are left
    out."""
    words: list[str] = []
    for key, option in options_of(model).items():
        if key in {"db", *without} or option.argument or not settings.typed(key):
            continue
        words += _words_of(option, value_of(settings, key))
    return words


def value_of(settings: Settings, key: str) -> Any:
    """The value of a key."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name if hasattr(value, name) else f"{name}_")
    return value


def _words_of(option: Option, value: Any) -> list[str]:
    """A value of an option, typed."""
    if isinstance(value, Mapping):
        named = [f"{option.key}.{name}={path}" for name, path in value.items()]
        return [word for pair in named for word in ("--set", pair)]
    if isinstance(value, bool) and not option.hidden:
        return [] if value == option.default else [f"--{'' if value else 'no-'}{option.name}"]
    words: list[str] = []
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(one, bool):
            text = str(one).lower()
        elif isinstance(one, float):
            text = f"{one:g}{'s' * (option.kind.metavar == 'TIME')}"
        elif isinstance(one, (str, int)):
            text = str(one)
        else:
            continue
        words += ["--set", f"{option.key}={text}"] if option.hidden else [f"--{option.name}", text]
    return words


def idle_options(settings: Settings, here: Collection[str]) -> str:
    """The options typed that do not act ``here`` (some of :data:`spectune.settings.WHERE`), with
    where they do; empty where all act."""
    idle: dict[tuple[str, ...], list[str]] = {}
    for key, option in options_of(type(settings)).items():
        if settings.typed(key) and option.acts and not set(option.acts) & set(here):
            idle.setdefault(option.acts, []).append(option.spelled)
    return "; ".join(
        f"{', '.join(sorted(options))} (acts {where_in_words(acts)})"
        for acts, options in idle.items()
    )


def where_in_words(acts: Sequence[str]) -> str:
    """Where a setting acts, in words; empty where it acts everywhere."""
    words = [WHERE[place] for place in acts]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _first(error: ValidationError) -> tuple[str, Any]:
    """The key of the first thing that is wrong, and what pydantic says of it."""
    first = error.errors()[0]
    return ".".join(str(part) for part in first["loc"] if isinstance(part, str)), first


def _parents(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _reason(error: Any) -> str:
    cause = error.get("ctx", {}).get("error")
    text = str(cause or error["msg"]).replace("Input should be", "it should be")
    return f"{shortened(str(error['input']), 60)!r}: {text}"
