"""Reading YAML files into pydantic models, with errors written for the person who wrote the file.

Text goes in; a validated model, or one sentence naming the file, the key and the remedy, comes
out. Used by layout and cluster files.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from hybridcp.errors import HybridCPError

Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: Path, what: str, error: type[HybridCPError]) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: the file.
        what: what it should hold, for messages ("layout").
        error: the class to raise.

    Raises:
        HybridCPError: of class `error`, if the file is missing, unreadable, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as reason:
        problem = reason.strerror or reason
        raise error(f"cannot read the {what} file {path}: {problem}") from None
    except UnicodeDecodeError:
        raise error(f"{path} is not a text file, so it is no {what} file") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as reason:
        where = getattr(reason, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        problem = getattr(reason, "problem", None) or "not YAML"
        raise error(f"{path}{line}: not valid YAML: {problem}") from None
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise error(f"{path}: a {what} file is a list of `key: value` lines, but it holds {found}")
    odd = next((key for key in data if not isinstance(key, str)), None)
    if odd is not None:
        raise error(f"{path}: keys of a {what} file are words, but one is {odd!r}")
    return data


def explain(problem: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a validation, in one sentence.

    Args:
        problem: what pydantic raised.
        model: the model that was validated, for near-miss suggestions.
    """
    # A misspelt key is also a missing one: name what was written, not what was meant.
    faults = sorted(
        problem.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"
    )
    first = faults[0]
    location = first["loc"]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if first["type"] == "missing":
        return f"{path} is missing"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not path:
        return message
    return f"{path}: {message}, got {first['input']!r}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        inner = [annotation, *getattr(annotation, "__args__", ())]
        nested = [a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def parse(
    data: dict[str, Any], model: type[Model], where: str, error: type[HybridCPError]
) -> Model:
    """Validate a mapping that came from `where`.

    Raises:
        HybridCPError: of class `error`, with the first fault in one sentence.
    """
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        raise error(f"{where}: {explain(problem, model)}") from None
