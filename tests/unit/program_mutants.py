"""Broken cuts that compute another program, for each invariant of `ddpopt.proof.program`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.unit.stitching import Ref, Row, Story, refs
from tests.unit.stories import GRAD, Mutant, body, constant, doubled_size, symbolic_number

Breaks = Callable[[Story], object]


def edit(piece: int, name: str, **changes: Any) -> Breaks:
    """Change a row of a piece."""
    return lambda told: told.edit(piece, name, **changes)


def add(piece: int, place: int, row: Row) -> Breaks:
    """Put one more row into a piece."""
    return lambda told: told.pieces[piece].rows.insert(place, row)


def feed(piece: int, name: str, value: Any) -> Breaks:
    """Give a piece another value for an input."""
    return lambda told: told.pieces[piece].inputs.update({name: value})


def give_back(change: Callable[[tuple[Any, ...]], Any]) -> Breaks:
    """Return something else."""
    return lambda told: setattr(told, "result", change(told.output))


def replace_at(place: int, value: Any) -> Breaks:
    """Return another value at one place."""
    return give_back(lambda output: (*output[:place], value, *output[place + 1 :]))


# --- which nodes run -----------------------------------------------------------------------------


def swap_inputs(told: Story) -> None:
    told.top_inputs = [told.inputs[1], told.inputs[0], *told.inputs[2:]]


def give_default(told: Story) -> None:
    told.top_inputs = [*told.inputs[:-1], replace(told.inputs[-1], args=(None,))]


def drop(told: Story) -> None:
    told.take(1, "drop1")
    told.edit(1, "parts", args=(Ref("lin1"), 2))


def move_on(told: Story) -> None:
    """A node moves to the next segment, behind all that it stood in front of."""
    told.pieces[1].rows.insert(1, told.take(0, "drop0"))
    told.pieces[0].outputs = {"lin0": Ref("lin0"), "total": Ref("total")}
    told.pieces[1].inputs.pop("drop0")
    told.pieces[1].inputs["lin0"] = Ref("lin0")


def move_out_of_span(told: Story) -> None:
    move_on(told)
    told.pieces[1].rows.insert(0, told.take(1, "drop0"))


def double_draw(told: Story) -> None:
    row = told.pieces[0].rows[told.place(0, "drop0")]
    move_on(told)
    told.pieces[0].rows.insert(2, row)


def compute_between_segments(told: Story) -> None:
    told.pieces[1].before.append(told.take(1, "read"))
    told.pieces[1].outputs.pop("read")


def read_too_early(told: Story) -> None:
    told.pieces[1].rows.insert(1, told.take(1, "parts"))


NODES = {
    "inputs": (
        Mutant("inputs swapped", "found w1, w0, w2", swap_inputs),
        Mutant("input with a default", "s0 = None", give_default),
    ),
    "nodes": (
        Mutant("node dropped", "node drop1 is in no segment", drop),
        Mutant("draw doubled", "node drop0 is in segment 0 and again in segment 1", double_draw),
    ),
    "nothing added": (
        Mutant("node added", "segment 1, node more: is not",
               add(1, 3, Row("more", torch.relu, refs("lin1")))),
        Mutant("grad mode switched in the middle", "node more: is not",
               add(1, 2, Row("more", GRAD, (True,)))),
        Mutant("node between segments", "node read: is in no segment", compute_between_segments),
    ),
    "order": (
        Mutant("node moved to the next segment", "segment 1, node drop0: runs after total", move_on),
    ),
    "definitions": (
        Mutant("read too early", "segment 1, node parts: reads drop1 before it is defined", read_too_early),
        Mutant(
            "an argument too few",
            "segment 0: 5 inputs expected, 4 arguments passed",
            add(0, 0, Row("late", "late", op="placeholder")),
        ),
    ),
}  # fmt: skip


# --- what they compute ---------------------------------------------------------------------------


def hold(name: str, value: Any) -> Breaks:
    """Another object behind an attribute of the last segment."""
    return lambda told: setattr(told, "other_held", [told.held, told.held, {**told.held, name: value}])


VALUES = {
    "outputs": (
        Mutant("outputs swapped", "output[0]: expected wrapped[0], found twice", give_back(
            lambda output: (output[1], output[0], *output[2:]))),
        Mutant("output missing", "output: expected (wrapped[0], twice, None, ", give_back(
            lambda output: output[:-1])),
        Mutant("constant of another type", "output[3]['all'][1]: expected 3, found 3.0", replace_at(
            3, {"pick": Ref("pick"), "all": [Ref("read"), 3.0]})),
    ),
    "calls": (
        Mutant("wrong item passed in", "args[0][0]: expected parts[0], found parts[1]",
               feed(2, "parts_0", Ref("parts_1"))),
        Mutant("tuple short of an item", "args[0]: expected parts, found (parts[0],)",
               edit(2, "cat", args=(refs("parts_0"), 1))),
        Mutant("True for 1", "segment 2, node shift: kwargs['alpha']: expected 1, found True",
               edit(2, "shift", kwargs={"alpha": True})),
        Mutant("another dtype", "node enter: args[1]: expected torch.bfloat16, found torch.float16",
               edit(0, "enter", args=("cpu", torch.float16, True, None))),
        Mutant("keyword lost", "segment 2, node lin2: kwargs: expected {'bias': b2}, found {}",
               edit(2, "lin2", kwargs={})),
        Mutant("literal for a value that is not fixed",
               "segment 2, node flat: args[1]: expected twice, found 6",
               edit(2, "flat", args=(Ref("lin2"), 6, -1))),
        Mutant("another constant than tracing found", "segment 1, node end: args[1]: expected size, found 5",
               edit(1, "end", args=(Ref("lin1"), 5)), constant),
        Mutant("a symbol computed again from another", "segment 1, node ratio: args[0]: expected 1, found 2",
               edit(1, "ratio", args=(2, Ref("s"))), symbolic_number),
        Mutant("another method", "expected call_method of view, found call_method of reshape",
               edit(2, "flat", target="reshape")),
        Mutant("method for a function", "expected call_function of mul, found call_method of mul",
               edit(1, "read", target="mul")),
        Mutant("another attribute", "segment 2, node shift: args[1]: expected attribute 'one'",
               hold("one", torch.ones(()))),
        Mutant("another body", "segment 2, node wrapped: args[0]: expected attribute 'body'",
               hold("body", body(1.0))),
    ),
}  # fmt: skip


# --- what tracing left on them -------------------------------------------------------------------


def note(piece: int, name: str, **notes: Any) -> Breaks:
    """Other metadata on a node."""
    return lambda told: told.edit(piece, name, meta={**told.meta[name], **notes})


def without(notes: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in notes.items() if name != key}


def lose(piece: int, name: str, key: str) -> Breaks:
    """One note less on a node."""
    return lambda told: told.edit(piece, name, meta=without(told.meta[name], key))


def lose_policy(told: Story) -> None:
    told.meta["lin2"]["recompute"] = "MUST_SAVE"
    lose(2, "lin2", "recompute")(told)


def relabel_input(piece: int, old: str, notes: Callable[[Story], dict[str, Any]], told: Story) -> None:
    """An input of a segment bears other metadata than the value that it carries."""
    told.meta["relabelled"] = notes(told)
    inputs = told.pieces[piece].inputs
    told.pieces[piece].inputs = {("relabelled" if name == old else name): v for name, v in inputs.items()}
    for row in told.pieces[piece].rows:
        if Ref(old) in row.args:
            told.edit(
                piece, row.name, args=tuple(Ref("relabelled") if a == Ref(old) else a for a in row.args)
            )


def lose_source(told: Story) -> None:
    told.top_inputs = [
        replace(row, meta=without(told.meta["w2"], "source")) if row.name == "w2" else row
        for row in told.inputs
    ]


METADATA = {
    "metadata": (
        Mutant("stack trace lost", "segment 1, node lin1: meta['stack_trace'] is lost",
               lose(1, "lin1", "stack_trace")),
        Mutant("stack trace of another", "segment 1, node lin1: meta['stack_trace'] is another",
               note(1, "lin1", stack_trace="line of lin0")),
        Mutant("source function of another", "segment 1, node lin1: meta['source_fn_stack'] is another",
               note(1, "lin1", source_fn_stack=[("lin1", "lin0")])),
        Mutant("example value copied", "segment 1, node read: meta['example_value'] is another",
               note(1, "read", example_value=torch.empty(4))),
        Mutant("checkpoint policy lost", "segment 2, node lin2: meta['recompute'] is lost", lose_policy),
        Mutant("metadata lost on a view taken again", "segment 2, node view: meta['stack_trace'] is lost",
               lose(2, "view", "stack_trace")),
        Mutant("example value of another on an input", "its example value is not that of drop0",
               partial(relabel_input, 1, "drop0", lambda told: told.meta["drop1"])),
        Mutant("source lost on a segment's input",
               "segment 2, input relabelled: its source is not that of w2",
               partial(relabel_input, 2, "w2", lambda told: without(told.meta["w2"], "source"))),
        Mutant("source lost on an input", "input w2: its source is not that of w2", lose_source),
    ),
}  # fmt: skip


# --- the state that they run in ------------------------------------------------------------------


def forget_span(told: Story) -> None:
    told.take(1, "again")
    told.take(1, "close")


def view_without_grad(told: Story) -> None:
    told.pieces[2].rows.insert(1, told.take(2, "view"))


STATE = {
    "state": (
        Mutant("autocast not entered again", "segment 1, node lin1: expected autocast('cpu', torch.bfloat16, "
               "True, None) and grad mode on, found no autocast and grad mode on", forget_span),
        Mutant("autocast entered with another dtype",
               "segment 1, node lin1: expected autocast('cpu', torch.bfloat16",
               edit(1, "again", args=("cpu", torch.float16, True, None))),
        Mutant("node moved out of its span", "segment 1, node drop0: expected autocast(", move_out_of_span),
        Mutant("grad mode not switched again",
               "segment 2, node scale: expected no autocast and grad mode off",
               lambda told: told.take(2, "again")),
        Mutant("view taken again without grad", "segment 2, node view: taken again with grad mode off",
               view_without_grad),
    ),
    "balance": (
        Mutant("autocast left open",
               "segment 0: expected no autocast and grad mode on after it, found autocast(",
               lambda told: told.take(0, "leave")),
        Mutant("grad mode leaks", "segment 1: expected no autocast and grad mode on after it, "
               "found no autocast and grad mode off", lambda told: told.take(1, "leave")),
    ),
}  # fmt: skip

SYMBOLS = {
    "symbols": (
        Mutant("symbol unbound", "segment 1, input pair: no input binds the symbol s",
               lambda told: told.pieces[1].inputs.pop("s"), doubled_size),
    ),
}  # fmt: skip

MUTANTS: Mapping[str, tuple[Mutant, ...]] = {**NODES, **VALUES, **METADATA, **STATE, **SYMBOLS}
"""The mutants that each invariant must reject, by its name."""
