"""How the body of a request becomes checked fields: strict, bounded, deaf to what it does not know.

JSON is parsed within bounds first. Then types are taken literally: "3", 3.0 and true are no
integers. A field that is null is as good as absent.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.serve.errors import invalid
from clocher_runtime.serve.refusals import Refused, from_validation

MAX_TOKENS = (1 << 31) - 1
MAX_SCHEMA_CHARS = 64 << 10
S = TypeVar("S", bound="Schema")


class Unsupported(NamedTuple):
    """A field of other servers that this one cannot obey.

    Attributes:
        harmless: values that ask for nothing, beside null.
        instead: what to do.
    """

    harmless: tuple[object, ...]
    instead: str


class Schema(BaseModel):
    """A JSON object in a request.

    Attributes:
        unsupported: fields that are refused when they ask for something, by name.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        for name, field in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in field.harmless:
                raise Refused(f"{name} is not supported; {field.instead}", name)
        return data

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return what a body says.

        Raises:
            ApiError: it is not JSON, not an object, too deep or too much, or a field is wrong.
        """
        try:
            body = parse_object(data, "the body")
        except FormatError as error:
            # What follows a semicolon is advice to Python programs.
            raise invalid(str(error).split("; use sys.")[0]) from None
        return checked(cls, body)


def checked(schema: type[S], body: object) -> S:
    """Return parsed JSON as a schema.

    Raises:
        ApiError: a field is wrong.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from None


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that is not too long to be compiled."""
    size = len(json.dumps(value))
    if size > MAX_SCHEMA_CHARS:
        raise Refused(
            f"a JSON schema has {size} characters; expected at most {MAX_SCHEMA_CHARS}: shorten it"
        )
    return value


JsonSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
ShortText = Annotated[str, StringConstraints(max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
