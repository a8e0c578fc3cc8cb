"""Turn a target on the command line into a case: the name of a case in the corpus, or a user's factory.

A factory is tried before ranks start. Invariant: any exception of the user's code becomes one `UsageError`
that names the target and the user's line.
"""

import contextlib
import importlib
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpopt.cases import corpus
from ddpopt.cases.case import Call, Case, step_seed
from ddpopt.errors import UsageError, did_you_mean

EXPECTED_RETURN = "(model, inputs), (model, args, kwargs) or a ddpopt.testing.Case"
OWN_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parents[1])
NOT_THE_USERS = ("<eval_with_key>", *(f"{folder}{os.sep}" for folder in OWN_FOLDERS))
PYTHONS = (sysconfig.get_path("stdlib"), "<frozen ")
TARGET_HELP = "give 'package.module:name', or the name of a case ('ddpopt cases' lists them)"


def resolve(target: str | Case | Callable[[], object]) -> Case:
    """Turn a target into a case.

    A factory is called under a seed, for every model and every input: with the seed of rank 0 and step 0 for
    the model, with the seed of the rank and step for inputs. Inputs drawn from the default generator
    therefore differ per rank; other inputs are the same on all ranks. The first call is made here; the first
    model, and the first inputs of rank 0 and step 0, are what it returned.

    Args:
        target: a case; a factory without arguments; ``package.module:name`` of either; or the name of a case
            in the corpus. A factory returns ``(model, inputs)``, ``(model, args, kwargs)`` or a case.
            ``inputs`` is a tuple or list of positional arguments, a mapping of keyword arguments, or a single
            argument.

    Returns:
        The case, named after the target.

    Raises:
        UsageError: if the target cannot be found, fails, or returns something else.
    """
    if isinstance(target, Case):
        return target
    if isinstance(target, str):
        found = _find(target)
        if isinstance(found, Case):
            return _tried(target, found) if ":" in target else found
        return _case_from_factory(target, found)
    if not callable(target):
        raise UsageError(f"expected a target that is a string, a Case or a callable, got {target!r}")
    return _case_from_factory(_name_of(target), target)


def _find(target: str) -> Case | Callable[[], object]:
    """Return the case or the factory that a string names."""
    if ":" not in target:
        return corpus.case(target)
    found: object = imported(target)
    if isinstance(found, Case) or callable(found):
        return found
    raise UsageError(
        f"target {target!r}: expected a Case or a callable without arguments, got {type(found).__name__}; "
        f"make it a function that returns {EXPECTED_RETURN}"
    )


def imported(target: str) -> Any:
    """Import what ``package.module:name`` refers to.

    Raises:
        UsageError: it cannot be found, or importing it fails.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"expected a target like 'package.module:name', got {target!r}; {TARGET_HELP}")
    found = _import(module_name, target)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, dir(found))
            raise UsageError(
                f"target {target!r}: module {module_name!r} has no attribute {attribute!r}{near}"
            )
        found = getattr(found, part)
    return found


def _import(module_name: str, target: str) -> object:
    """Import a module; any failure becomes a one-sentence error for the user, with its cause kept.

    A module that calls ``sys.exit(0)`` must not end ddpopt with a success code.
    """
    try:
        with _current_folder_first():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _fault(target, f"importing {module_name!r}", error) from error
        package, _, last = error.name.rpartition(".")
        folders = getattr(sys.modules.get(package), "__path__", [os.getcwd()])
        near = did_you_mean(last, [module.name for module in pkgutil.iter_modules(folders)])
        raise UsageError(
            f"target {target!r}: there is no module {error.name!r}; install it, or add the directory that "
            f"contains it to PYTHONPATH{near}"
        ) from error
    except (Exception, SystemExit) as error:
        raise _fault(target, f"importing {module_name!r}", error) from error


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """Look for modules in the current folder first, if it is on the path.

    Only while the user's code runs: a file 'rich.py' must not hide the package that ddpopt imports. What that
    code adds to the path stays there.
    """
    first = [entry for entry in sys.path if entry in ("", os.getcwd())][:1]
    sys.path[:0] = first
    try:
        yield
    finally:
        for entry in first:
            with contextlib.suppress(ValueError):  # that code may have removed it
                sys.path.remove(entry)


def _name_of(factory: Callable[[], object]) -> str:
    """Name a factory as a target would; a factory without a name is named after its type."""
    return f"{factory.__module__}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"


def _case_from_factory(name: str, factory: Callable[[], object]) -> Case:
    """Call a factory once, to check what it returns and whether it makes a whole case."""
    made = called(name, factory, 0)
    if isinstance(made, Case):
        return _tried(name, made)
    parts = _Parts(name, factory, made)
    return Case(name, partial(parts.take, 0), partial(parts.take, 1), f"made by {name}")


def _tried(name: str, case: Case) -> Case:
    """A case whose model and inputs were made once, so that errors are reported before ranks start."""
    called(name, case.model, 0, "making its model")
    called(name, partial(case.inputs, 0, 0), 0, "making its inputs for rank 0, step 0")
    return case


class _Parts:
    """The model and the inputs that a factory makes; those of its first call are used too, once."""

    def __init__(self, name: str, factory: Callable[[], object], made: object) -> None:
        self._name = name
        self._factory = factory
        self._first: dict[int, Any] = dict(enumerate(_split(name, made)))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_first": {}}  # another process makes its own

    def take(self, part: int, rank: int = 0, step: int = 0) -> Any:
        """Make the model (0), or the inputs (1) of a rank and a step."""
        seed = step_seed(rank, step)
        if seed == 0 and part in self._first:
            return self._first.pop(part)
        return _split(self._name, called(self._name, self._factory, seed))[part]


def called(
    name: str, factory: Callable[[], object], seed: int, doing: str = "calling it without arguments"
) -> object:
    """Call a factory under a seed, and restore the caller's generator state."""
    try:
        with _current_folder_first(), torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return factory()
    except (Exception, SystemExit) as error:
        raise _fault(name, doing, error) from error


def _fault(name: str, doing: str, error: BaseException) -> UsageError:
    """An error in the user's code, with its line."""
    return UsageError(f"target {name!r}: {doing} failed: {type(error).__name__}: {error}{users_line(error)}")


def users_line(error: BaseException) -> str:
    """Name the innermost line of user code that an exception passed through; empty if there is none.

    Dynamo's exceptions do not pass through the code that it traces; they name it.
    """
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]
    if isinstance(error, SyntaxError):
        frames = [traceback.FrameSummary(error.filename or "?", error.lineno, "<module>", line=error.text)]
    own = [frame for frame in frames if is_of_user(frame.filename)]
    return " ({0.filename}:{0.lineno} in {0.name}: {0.line})".format(own[-1]) if own else ""


def is_of_user(file: str) -> bool:
    """Whether a file is not a part of torch, ddpopt or Python."""
    if file.startswith(NOT_THE_USERS):
        return False
    return "site-packages" in file or not file.startswith(PYTHONS)


def _split(name: str, made: object) -> tuple[nn.Module, Call]:
    """Split the value that a factory returned into the model and the arguments of its forward."""
    parts = made if isinstance(made, tuple) else ()
    if len(parts) == 2 and isinstance(parts[0], nn.Module):
        return parts[0], _as_call(parts[1])
    if len(parts) == 3 and isinstance(parts[0], nn.Module) and isinstance(parts[2], Mapping):
        return parts[0], (_as_call(parts[1])[0], dict(parts[2]))
    raise UsageError(f"target {name!r}: expected it to return {EXPECTED_RETURN}, got {_describe(made)}")


def _as_call(inputs: object) -> Call:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    return (inputs,), {}


def _describe(made: object) -> str:
    """Describe a value by its type, and a tuple by the types of its items: reprs of models are too long."""
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(part).__name__ for part in made)})"
