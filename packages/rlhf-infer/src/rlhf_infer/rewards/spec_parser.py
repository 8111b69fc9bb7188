"""Lines of text that name a reward function, and the code that they name."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_data import UserError, has_module, import_object
from rlhf_infer.rewards.conventions import RewardFunction, function_name

_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_ATTRIBUTES = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_FREE = {"pattern", "template", "extra_body", "url", "path", "principles", "base", "judge"}
"""Options whose values may have a comma and `name=` in them."""


@dataclass(frozen=True)
class Builder:
    """Something a line may name.

    Options have a type or function that turns a text into each; `paths` are those that name files or folders.
    """

    build: Callable[..., RewardFunction]
    options: Mapping[str, Any]
    required: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


def builder_of(kind: type) -> Builder:
    """The builder of a class whose options are its constructor's annotated arguments."""
    parameters = inspect.signature(kind, eval_str=True).parameters
    options = {name: converter(parameter.annotation) for name, parameter in parameters.items()}
    required = (name for name, parameter in parameters.items() if parameter.default is parameter.empty)
    return Builder(kind, options, tuple(required))


def build(spec: str, builders: Mapping[str, Builder], options: Mapping[str, Any]) -> RewardFunction:
    """The reward function that a line names; see `RewardFunctionFactory.from_spec`."""
    rule, _, rest = spec.partition(":")
    if rule in builders:
        return _built(rule, builders[rule], _parsed(rule, builders[rule], rest) | dict(options))
    if spec.startswith(("http://", "https://")):
        return _built("remote", builders["remote"], {"url": spec, **options})
    path, colon, attributes = spec.rpartition(":")
    is_path = path.endswith(".py") or _DOTTED.fullmatch(path) or _ATTRIBUTES.fullmatch(path)
    if colon and is_path and _ATTRIBUTES.fullmatch(attributes):
        return user_function(spec, options)
    if spec.endswith(".py"):
        raise UserError(
            f"reward {spec!r} is a file; name the function in it, as in {spec}:my_reward",
            code="missing_function_name",
        )
    if spec and not colon and ("/" in spec or Path(spec).is_dir()):
        return _built("model", builders["model"], {"path": spec, **options})
    if _DOTTED.fullmatch(spec) and has_module(spec.partition(".")[0]):
        return user_function(spec, options)
    near = difflib.get_close_matches(rule, builders, n=1)
    raise UserError(
        f"reward {spec!r} is unknown{f'; did you mean {near[0]}?' if near else ''}; expected a rule "
        f"({', '.join(builders)}), a model folder, a hub name with a slash, pkg.mod:function, "
        "path/to/file.py:function, or a URL",
        code="unknown_reward",
    )


def with_paths(spec: str, builders: Mapping[str, Builder], absolute: Callable[[str], str]) -> str:
    """The line with `absolute` of every file and folder in it; one that `build` refuses stays as it is."""
    rule, _, rest = spec.partition(":")
    if rule in builders:
        parts = _parts(builders[rule], rest) if builders[rule].paths and rest else []
        found = [_absolute_option(part, builders[rule], builders, absolute) for part in parts]
        return f"{rule}:{','.join(found)}" if found else spec
    path, colon, attributes = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return f"{absolute(path)}:{attributes}"
    file = Path(f"{path}.py")
    if colon and path.isidentifier() and file.is_file() and _origin(path) in (None, str(file.absolute())):
        return f"{absolute(str(file))}:{attributes}"
    return spec if colon else absolute(spec)


def _absolute_option(
    part: str, builder: Builder, builders: Mapping[str, Builder], absolute: Callable[[str], str]
) -> str:
    name, equals, value = part.partition("=")
    if name in builder.paths:
        value = absolute(value)
    if name == "base":
        value = with_paths(value, builders, absolute)
    return f"{name}{equals}{value}"


def _origin(module: str) -> str | None:
    """The file of a top-level module in Python's path."""
    found = importlib.util.find_spec(module)
    return found.origin if found else None


def user_function(function: RewardFunction | str, options: Mapping[str, Any]) -> RewardFunction:
    """See `RewardFunctionFactory.from_function`."""
    found: Any = import_object(function, what="reward") if isinstance(function, str) else function
    if isinstance(found, type):
        try:
            found = found(**options)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a class of the user's, which fails as it likes
            raise UserError(
                f"reward {function} cannot be made ({type(error).__name__}: {error}); check its options",
                code="reward_not_made",
            ) from error
    elif options:
        plain, found = found, functools.partial(found, **options)
        vars(found).update(vars(plain))
    if not callable(found):
        raise UserError(
            f"reward {function} is a {type(found).__name__}; expected a function", code="not_a_function"
        )
    return found if hasattr(found, "name") else _Named(found)


class _Named:
    """A user's function under its name, with its attributes such as `state` and `is_probability`.

    `inspect.unwrap` and `inspect.signature` see the function itself.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.__wrapped__ = function
        self.name = function_name(function)

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # of a copy, before it has any attribute
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def _built(rule: str, builder: Builder, options: dict[str, Any]) -> RewardFunction:
    if missing := [name for name in builder.required if name not in options]:
        raise UserError(
            f"reward {rule} needs {', '.join(missing)}; write {rule}:{missing[0]}=...",
            code="missing_option",
            option=missing[0],
        )
    for name in options:
        if name not in builder.options:
            _refuse_option(rule, name, builder)
    return builder.build(**options)


def _parsed(rule: str, builder: Builder, text: str) -> dict[str, Any]:
    """The options `name=value,name=value` of a rule; a comma inside a value may stay."""
    if not text:
        return {}
    options: dict[str, Any] = {}
    for part in _parts(builder, text):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(
                f"reward {rule}: expected option=value, got {part!r}; "
                f"its options: {', '.join(builder.options)}",
                code="unknown_option",
                option=name,
            )
        if name not in builder.options:
            _refuse_option(rule, name, builder)
        if name in options:
            said = f"reward {rule} has the option {name} twice; give it once"
            raise UserError(said, code="repeated_option", option=name)
        options[name] = _converted(f"reward {rule}: {name}", value, builder.options[name])
    return options


def _parts(builder: Builder, text: str) -> list[str]:
    parts: list[str] = []
    for part in re.split(r",(?=[a-z_]+=)", text):
        known = part.partition("=")[0] in builder.options
        if parts and not known and parts[-1].partition("=")[0] in _FREE:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _refuse_option(rule: str, name: str, builder: Builder) -> typing.NoReturn:
    near = difflib.get_close_matches(name, builder.options, n=1)
    raise UserError(
        f"reward {rule} has no option {name!r}; its options: {', '.join(builder.options)}"
        + (f"; did you mean {near[0]}?" if near else ""),
        code="unknown_option",
        option=name,
    )


def _converted(where: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        if kind is dict:
            raise ValueError("it is given in Python only")
        return kind(text)
    except ValueError as error:
        name = "JSON" if kind is json.loads else getattr(kind, "__name__", str(kind))
        message = f"{where} is {text!r}, which is not a valid {name}: {error}"
        raise UserError(message, code="invalid_option") from error


def converter(annotation: Any) -> Callable[[str], Any]:
    """Converter of a text into an option's value: `int` for `int | None`, `str` for `Literal["a", "b"]`.

    Raises:
        TypeError: a text cannot be turned into such a value.
    """
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(each for each in typing.get_args(annotation) if each is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        return str
    if typing.get_origin(annotation) is dict:
        return json.loads
    if annotation is bool:
        return _truth
    if annotation in (str, int, float):
        return annotation
    raise TypeError(
        f"an option of type {annotation} cannot be written in a line; use str, int, float or bool"
    )


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"
