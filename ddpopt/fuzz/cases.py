"""A stored failure: the model as a value, how it was run, and how it fails; one JSON file each.

A case may come from another machine or a mail, so its model is parsed without running the text.
Invariant: ``FoundCase.from_json(case.to_json()) == case``, and equal failures have equal file names.
"""

import ast
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.fuzz.questions import STANDALONE, WHOLE, Answer, Outcome, Setting, Task
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.judge.engines.modes import mode
from ddpopt.testing.drawn import DrawnModel, step

VERSION = 1


@dataclass(frozen=True)
class FoundCase:
    """A model that fails.

    Attributes:
        model: the model.
        mode: name of the mode, as for `ddpopt.judge.engines.modes.mode`.
        setting: how it was run.
        signature: signature of the failure.
        kind: whether the mode is wrong, or the backend.
        detail: the full text of the failure.
        torch: release of torch that shows the failure.
        origin: where the model was drawn: seed, shard and place; empty if written by hand.
        about: a person's description of it.
    """

    model: DrawnModel
    mode: str
    setting: Setting
    signature: FailureSignature
    kind: Outcome = Outcome.WRONG
    detail: str = ""
    torch: str = ""
    origin: str = ""
    about: str = ""

    @property
    def task(self) -> Task:
        """The question to which this failure is the answer."""
        return task_of(self.model, (self.mode,), self.setting)

    @property
    def owner(self) -> str:
        """The culprit: the mode, the backend in any mode, or verification."""
        others = {Outcome.BACKEND: f"backend {self.setting.backend}", Outcome.BROKEN: "verification"}
        return others.get(self.kind, self.mode)

    @property
    def owner_mode(self) -> str:
        """The mode in which the failure shows: the one without any optimizer if the backend is at fault."""
        return WHOLE if self.kind is Outcome.BACKEND else self.mode

    @property
    def key(self) -> str:
        """Equal for failures that are counted as one."""
        return f"{self.owner} / {self.setting.backend} / {self.signature}"

    @property
    def stem(self) -> str:
        """A file name without its suffix."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.owner} {self.signature.what}".lower()).strip("-")
        return f"{words[:60].strip('-')}-{hashlib.sha256(self.key.encode()).hexdigest()[:6]}"

    @property
    def is_torchs(self) -> bool:
        """Whether the fault is torch's own, without any part of ddpopt."""
        return self.mode in STANDALONE or self.kind is Outcome.BACKEND

    def fails_so(self, answer: Answer) -> bool:
        """Whether an answer is this same failure."""
        return answer.kind is self.kind and answer.signature == self.signature

    def to_json(self) -> str:
        """Return it as a JSON object."""
        data = {
            "version": VERSION,
            **{name: value for name, value in vars(self).items() if name not in ("model", "setting")},
            "signature": asdict(self.signature),
            "setting": asdict(self.setting),
            "features": sorted(self.model.features),
            "model": repr(self.model),
        }
        return json.dumps(data, indent=2)

    @staticmethod
    def from_json(text: str, name: str = "the case") -> "FoundCase":
        """Read what `to_json` wrote.

        Args:
            text: a JSON object.
            name: name of the file, for errors.

        Raises:
            UsageError: the text is something else.
        """
        try:
            data = json.loads(text)
            version = data.pop("version")
            data.pop("features")
            model = read_model(data.pop("model"))
            setting = Setting(**data.pop("setting"))
            signature = FailureSignature(**data.pop("signature"))
            kind = Outcome(data.pop("kind"))
            mode(data["mode"])  # else there is no such engine here
            case = FoundCase(model=model, setting=setting, signature=signature, kind=kind, **data)
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            words = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{name}: expected a case that 'ddpopt fuzz' wrote, got something else: {words}"
            ) from error
        if version != VERSION:
            raise UsageError(f"{name}: expected a case of version {VERSION}, got {version!r}")
        return case

    @staticmethod
    def read(file: Path) -> "FoundCase":
        """Read a case file.

        Raises:
            UsageError: there is no such file, or it is not a case.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read the case {str(file)!r}: {error.strerror}") from error
        return FoundCase.from_json(text, str(file))


def task_of(model: DrawnModel, modes: tuple[str, ...], setting: Setting) -> Task:
    """Make the task of judging a model in some modes."""
    return Task(model.source, model.cap_bytes, modes, setting, training=model.training)


_CALLS: dict[str, Callable[..., Any]] = {"DrawnModel": DrawnModel, "step": step}


def read_model(text: str) -> DrawnModel:
    """Read what ``repr`` wrote.

    Args:
        text: ``DrawnModel(...)``, made of ``step(...)`` and literals.

    Returns:
        An equal model.

    Raises:
        UsageError: the text is something else, or names a block that is not registered.
    """
    try:
        found = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise UsageError(f"expected the repr of a DrawnModel, got {text[:80]!r}: {error}") from error
    if not isinstance(found, DrawnModel):
        raise UsageError(f"expected the repr of a DrawnModel, got {text[:80]!r}")
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            keywords = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
            return _CALLS[name](*map(_value, node.args), **keywords)
        case ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case _:
            return ast.literal_eval(node)


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically: if the process ends during the write, the file is unchanged.

    Args:
        file: a file in an existing folder.
        text: the text, written as UTF-8.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise UsageError(f"--out: cannot write {str(file)!r}: {error.strerror}; name another") from error
    finally:
        temporary.unlink(missing_ok=True)
