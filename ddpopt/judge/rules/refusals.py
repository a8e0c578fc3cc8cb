"""All that a trial may be refused for, each with the page that documents it and the test that shows it.

Only ddpopt's own errors refuse, and only those in this table: another exception of an engine, a backend or
the judge is a finding, whatever its type. Invariant: a message that no row knows is no refusal.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """One reason.

    Attributes:
        pattern: a regular expression that the error's message contains.
        page: the page of the documentation that says so, in ``docs/``.
        words: how the page says it.
        test: the test that shows it, in ``tests/``: file and name.
        if_ranks_differ: whether it counts only where the case or the option says that ranks differ; anywhere
            else that is a fault.
    """

    pattern: str
    page: str
    words: str
    test: str
    if_ranks_differ: bool = False


HERE = "unit/judge/rules/test_refusals.py::test_each_refusal_is_known_by_its_row"
CAPTURED = "multigpu/test_step.py::test_what_cannot_be_captured_is_said_and_leaves_everything_as_it_was"
LATER = "multigpu/test_step.py::test_what_a_later_step_would_ignore_is_an_error_each_time"
IN_PARTS = "multigpu/test_step_reductions.py::test_gradients_that_are_kept_must_come_from_one_backward"
LEFT = "multigpu/test_step_reductions.py::test_a_gradient_of_one_rank_that_ddp_would_average_later_is_refused"
PENDING = "multigpu/test_step_reductions.py::test_a_forward_without_a_backward_is_remembered"
MODES = "multigpu/test_step.py::test_a_mode_that_watches_operators_is_refused_and_does_no_harm"
DIFFER = "multigpu/test_step.py::test_ranks_that_differ_in_a_later_step_all_raise_and_may_go_on"
JOINING = "multigpu/test_step_joining.py::test_what_ranks_without_inputs_cannot_repeat_is_refused"
SETS = "multigpu/test_step_unused.py::test_there_is_a_limit_of_sets_of_parameters"
COUNTS = "multigpu/test_step.py::test_an_optimizer_that_counts_in_numbers_is_refused_under_a_scaler"
PLAIN = "multigpu/test_step_replicate.py::test_what_cannot_be_trained_so_is_said"
OUTSIDE = "multigpu/test_step_replicate.py::test_an_optimizer_whose_state_is_divided_is_called_in_steps_only"
CLOSURE = "multigpu/test_step_replicate.py::test_a_closure_is_refused_where_the_state_is_divided"
OPTIONS = "`step` of its own, but no `optimizer`"
REFUSALS: tuple[Refusal, ...] = (
    # engines
    Refusal(r"has no no_sync\(\)", "engines.md", "options that need it are *refused*", HERE),
    Refusal(r"has a step\(\) of its own, but no optimizer\(\)", "engines.md", OPTIONS, HERE),
    Refusal(
        r"a scheduler needs a torch\.optim\.Optimizer", "engines.md", "is no `torch.optim.Optimizer`", HERE
    ),
    Refusal(r"trains on the default group of \d+ ranks only", "modes.md", "the default group only", HERE),
    Refusal(r"needs \d+ x N ranks", "modes.md", "needs 4 ranks or more", HERE),
    Refusal(
        r"with use_orig_params=False",
        "modes.md",
        "`use_orig_params=False` is refused",
        "multigpu/test_fsdp_claims.py::test_fsdp1_without_the_original_parameters_is_refused_with_what_to_do",
    ),
    Refusal(r"has no submodule with parameters to compile", "modes.md", "no submodule to compile", HERE),
    Refusal(r"takes parameters of one dtype", "modes.md", "take parameters of one dtype only", HERE),
    Refusal(r"\d+ rows need the default group", "modes.md", "the default group only", HERE),
    Refusal(r"a module without DDP has no ", "modes.md", "a module without DDP has no other argument", HERE),
    Refusal(r"is not installed here", "modes.md", "need the packages of the extra", HERE),
    # options
    Refusal(r"resumes no parts of models", "modes.md", "`resumed` takes no mesh", HERE),
    # strategies
    Refusal(
        r"of the private names that ddpopt uses",
        "limits.md",
        "Some releases of torch",
        "unit/test_torch_private.py::test_a_missing_name_is_told_with_its_cost_and_who_has_it",
    ),
    Refusal(
        r"compiled autograd captures this backward",
        "limits.md",
        "compiled autograd around the backward",
        "multigpu/test_inline.py::test_compiled_autograd_is_refused_before_anything_is_sent",
    ),
    Refusal(
        r"torch\.distributed\.autograd\.context\(\)",
        "limits.md",
        "distributed autograd",
        "integration/test_fresh_interpreters.py"
        "::test_distributed_autograd_gets_its_gradients_from_split_and_is_refused_by_inline",
    ),
    Refusal(
        r"^delay_all_reduce_named_params: ",
        "limits.md",
        "`delay_all_reduce_named_params`",
        "integration/test_limits.py::test_delayed_all_reduces_are_refused_before_anything_is_compiled",
    ),
    # train_step
    Refusal(r"train_step: expected torch >= 2\.13", "step.md", "2.13", HERE),
    Refusal(r"cannot be captured as one graph", "step.md", "what Dynamo cannot trace", CAPTURED),
    Refusal(r"and it calls none; wrap the model", "step.md", "calls no DDP module", CAPTURED),
    Refusal(r"takes plain modules, got the DDP", "parallel.md", "calls or gets a DDP module", PLAIN),
    Refusal(
        r"expected parameters of modules that the", "parallel.md", "of any other module is an error", PLAIN
    ),
    Refusal(r"Call backward\(\) once and add the losses", "parallel.md", "adds another one to it", PLAIN),
    Refusal(r"was called outside of the train step", "parallel.md", "outside of the step", OUTSIDE),
    Refusal(r"that are called with a closure", "parallel.md", "calls an optimizer with a closure", CLOSURE),
    Refusal(r"two backward passes of one step", "step.md", "two synchronized backward passes", CAPTURED),
    Refusal(r"holds no parameter of", "step.md", "has an optimizer of other parameters only", CAPTURED),
    Refusal(r"does not support hooks on", "step.md", "hooks on `AccumulateGrad` nodes", CAPTURED),
    Refusal(r"train_step cannot run under ", "step.md", "under a `TorchDispatchMode`", MODES),
    Refusal(r"does not support that .* uses join\(", "step.md", "under `join()`", JOINING),
    Refusal(r"does not support that .* uses ", "step.md", "uses a communication hook", LATER),
    Refusal(r"different sets of parameters", "step.md", "up to 16 times", SETS),
    Refusal(r"parameters of .* were replaced", "step.md", "parameters were replaced", LATER),
    Refusal(r"has sparse gradients", "step.md", "sparse gradients", HERE),
    Refusal(r"does not support GradScaler with", "step.md", "whose state counts in plain numbers", COUNTS),
    Refusal(
        r"takes a number that changes",
        "step.md",
        "a number that changes",
        "unit/graph/test_numbers.py::test_an_operation_that_takes_numbers_only_says_what_to_do",
    ),
    Refusal(r"got no gradient for", "step.md", "leaves a parameter without a gradient", CAPTURED),
    Refusal(r"in the backward in which others", "step.md", "for which DDP itself fails", CAPTURED),
    Refusal(r"before the module's gradients are complete", "step.md", "for which DDP itself fails", CAPTURED),
    Refusal(r"in its first iteration only", "step.md", "writes to an output", CAPTURED),
    Refusal(r"is used before all backwards", "step.md", "in several backward passes, and keeps", IN_PARTS),
    Refusal(r"got a gradient of this rank alone, and no", "step.md", "gradients of one rank", LEFT),
    Refusal(r"and no backward followed", "step.md", "forward without a backward", PENDING),
    Refusal(r"the ranks' steps do not communicate alike", "step.md", "other branches", DIFFER, True),
)


def refusal_of(text: str) -> Refusal | None:
    """The row that knows the message of one of ddpopt's own errors; None if there is none."""
    return next((row for row in REFUSALS if re.search(row.pattern, text)), None)
