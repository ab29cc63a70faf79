"""The base of all request bodies: validated once, with errors that name a field.

No field is silently ignored. Known fields are validated. Known but unsupported ones (`NOT_YET`) are
refused unless their value requests nothing, such as `best_of: 1`. Unknown ones are collected, so
that the reply can name them, and so are those about how to serve (`IGNORED`), unless their value
requests nothing.

Clients write the same request in several ways. In every field that may be absent, null is absent,
and so is an empty text, list or object that the field does not accept; `8.0` is a whole number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, ModelName
from mlxserve.api.errors import ApiError, invalid_value
from mlxserve.api.model_names import ModelNames

# Values that request nothing by the name of their field, other than null and empty ones.
NotYet: TypeAlias = Mapping[str, tuple[object, ...]]

# Fields that identify or route: accepted with any value and without a warning.
INERT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
)


class StrictModel(BaseModel):
    """A model without conversions between types, but for the spellings of `request_body`.

    Unknown fields are kept, to be reported.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _spelled_alike(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return validate(value)
        sent = {
            name: _whole(item) if type(item) in (float, list) else item
            for name, item in value.items()
            if item is not None or not cls._may_be_absent(name)
        }
        try:
            return validate(sent)
        except ValidationError as error:
            refused = {each["loc"][0] for each in error.errors() if each["loc"]}
            empty = {name for name in refused if cls._may_be_absent(name) and _is_empty(sent[name])}
            if not empty:
                raise
            # Once more from the start: a list stops at its first error.
            return cls.model_validate({n: item for n, item in sent.items() if n not in empty})

    @classmethod
    def _may_be_absent(cls, name: object) -> bool:
        field = cls.model_fields.get(str(name))
        return field is not None and not field.is_required()


class KindedModel(StrictModel):
    """A model of several kinds, each of which requires some of the fields.

    Unknown kinds keep only their type and id.
    """

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]]

    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)]

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_content(cls, value: Any) -> Any:
        kind = value.get("type", "message") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in cls.NEEDS:
            return value
        return {name: value[name] for name in ("type", "id") if isinstance(value.get(name), str)}

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        for name in self.NEEDS.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} needs `{name}`")
        return self


class RequestBody(StrictModel):
    """The base of all request bodies."""

    NOT_YET: ClassVar[NotYet] = {}
    IGNORED: ClassVar[NotYet] = {}

    model: ModelName | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Validate a body. Raises ApiError 400, which names the invalid field."""
        _refuse_unsupported(body, cls.NOT_YET)
        fields = {
            name: value
            for name, value in body.items()
            if name not in cls.NOT_YET
            and not (name in cls.IGNORED and _requests_nothing(value, cls.IGNORED[name]))
        }
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _first_error(error) from error

    def check_model(self, names: ModelNames) -> str | None:
        """Return a warning for the name of another model. Raises ApiError for a refused name."""
        return names.check(self.model)

    @property
    def prompt_field(self) -> str:
        """The name of the prompt's field in errors."""
        return "prompt"

    def sent(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the fields among `names` that were sent, and not as null."""
        values = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def unknown_fields(self) -> list[str]:
        return [path for path in _extras(self, "") if path not in INERT]


def _whole(value: object) -> object:
    """A number, or the numbers of a list, as integers where nothing is behind their point."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and float in map(type, value):
        return [_whole(item) for item in value]
    return value


def _is_empty(value: object) -> bool:
    return isinstance(value, (str, list, dict)) and not value


def _requests_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    return value is None or _is_empty(value) or value in harmless


def _refuse_unsupported(body: Mapping[str, Any], not_yet: NotYet) -> None:
    for name, harmless in not_yet.items():
        if name not in body or _requests_nothing(body[name], harmless):
            continue
        others = [json.dumps(other) for other in harmless]
        instead = f"leave it out or send {' or '.join(others)}" if others else "leave it out"
        raise ApiError(
            400,
            f"{name}: this value is not supported yet; {instead}.",
            param=name,
            code="unsupported_parameter",
        )


def _first_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not path:
        # A rule over several fields. Its message begins with the one to change.
        path, _, message = message.partition(": ")
    if first["type"] == "missing":
        return ApiError(400, f"{path}: is required.", param=path, code="missing_required_parameter")
    return invalid_value(path, f"{message}{_shown(first)}")


def _shown(error: Mapping[str, Any]) -> str:
    """The refused value, if it is short enough to help."""
    value = error["input"]
    if error["type"] == "value_error" or isinstance(value, (dict, list)):
        return ""
    return f", got {str(value)[:40]!r}" if isinstance(value, str) else f", got {value!r}"[:60]


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _extras(model: BaseModel, prefix: str) -> Iterator[str]:
    """Yield paths of undeclared fields, each once, such as `messages[].cache_control`."""
    seen: set[str] = set()
    for name, value in (model.model_extra or {}).items():
        if value is not None:
            seen.add(prefix + name)
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            seen.update(_extras(value, f"{prefix}{name}."))
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for item in value:
                seen.update(_extras(item, f"{prefix}{name}[]."))
    yield from sorted(seen)
