"""A DDP reducer that uses a plan's buckets, and its installation in a DDP module.

DDP's reducer rebuilds its buckets once, in the order in which it saw gradients become ready. This reducer
starts with the plan's buckets and keeps them.

Invariant: except for its buckets, the new reducer behaves like the one that DDP made: same options, same
communication hooks, same errors, same states between forward and backward.

Most writes to private interfaces of DDP and its reducer are in this module
(``torch/nn/parallel/distributed.py``, ``torch/csrc/distributed/c10d/reducer.cpp``).
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Reducer  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.held import as_built, planned_reducer
from ddpopt.ddp.ready_hooks import ready_hooks, registered
from ddpopt.ddp.specs import specs_by_id
from ddpopt.ddp.state import state_of
from ddpopt.planning.plan import Plan

REASON = "part of DDP, not of the model"
FIRST_REBUILT = 1
"""The first iteration of DDP's log in which its own reducer has rebuilt its buckets."""

# torch does not mark what torch.distributed re-exports.
_c10d: Any = dist
_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_dynamo(function: _Function) -> _Function:
    """Decorate a function that DDP's forward calls, so that Dynamo traces neither it nor its callees.

    Dynamo skips the frames of ``torch.nn.parallel.distributed``, but would trace our frames that they call.

    Args:
        function: the function not to trace.

    Returns:
        The function, wrapped by ``torch.compiler.disable``.
    """
    disabled: _Function = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]  # of torch
    return disabled


class WatchedLogger:
    """Replaces a module's logger, to see which of its functions DDP calls. All calls also go to that logger.

    DDP calls one right before each forward that will be synchronized, one on entering ``join()``, and one
    before a communication hook is registered. A watched logger outlives the module's reducer.

    Args:
        logger: the logger, which may be watched itself.
        watcher: its `called` gets the name of each function, before the call.
    """

    def __init__(self, logger: Any, watcher: Any) -> None:
        self.logger = logger
        self.watcher = watcher

    @outside_dynamo
    def __getattr__(self, name: str) -> Any:
        self.watcher.called(name)
        return getattr(self.logger, name)


class PlannedReducer(Reducer):
    """A reducer that keeps the buckets it was built with.

    Attributes:
        plan: the plan with its buckets.
        parameters: its parameters, in its own order.
        expects_sparse: for each parameter, whether its gradient is sparse.
        names: the plan's name of each parameter, by ``id``; the module's name may have changed since.
        is_removed: whether it was disconnected from the backward by ``ddp._remove_autograd_hooks()``.
    """

    def __init__(self, ddp: Any, plan: Plan, names: Mapping[int, str], arguments: Mapping[str, Any]) -> None:
        super().__init__(**arguments)
        self.plan = plan
        self.names = names
        self._ddp = weakref.ref(ddp)
        self._work_handle: tuple[Any, bool] | None = None
        self.parameters: list[torch.Tensor] = arguments["params"]
        self.expects_sparse: list[bool] = arguments["expect_sparse_gradients"]
        self.is_removed = False
        self._strides = [parameter.stride() for parameter in self.parameters]
        # In unused-parameter mode C++ does not record the ready order, so there is nothing to forget.
        self._notes_ready_order = not arguments["find_unused_parameters"]
        self._has_marked = False

    @outside_dynamo
    def prepare_for_backward(self, output: list[torch.Tensor]) -> None:
        """Expect a backward, like ``Reducer::prepare_for_backward``.

        Args:
            output: the tensors that the module returned; used only in unused-parameter mode.
        """
        self._forget_ready_order()
        super().prepare_for_backward(output)

    @outside_dynamo
    def _rebuild_buckets(self) -> bool:
        # DDP calls this before every forward with gradients, and before each backward that a joined rank
        # shadows. Here DDP also detects that the previous backward did not finish.
        self._check_reducer_finalized()
        ddp: Any = self._ddp()
        is_in_use = ddp is not None and ddp.reducer is self and not ddp._has_rebuilt_buckets
        due = bool(self._notes_ready_order and is_in_use and any(self.get_backward_stats()))
        if due and (ddp.gradient_as_bucket_view or [p.stride() for p in self.parameters] != self._strides):
            # After its first backward DDP rebuilds its buckets once, for the parameters' current layout
            # (channels_last, for instance), and makes the existing gradients views of the new buckets.
            ddp._has_rebuilt_buckets = True
            install(ddp, self.plan)
            ddp.reducer.prepare_for_forward()
            if self._work_handle is not None:
                ddp.reducer._set_forward_pass_work_handle(*self._work_handle)
        self._work_handle = None
        return due

    @property
    def replaces_rebuilt(self) -> bool:
        """Whether DDP's own reducer would rebuild its buckets."""
        return self._notes_ready_order

    def _should_finalize_after_backward(self) -> bool:
        # torch 2.15 asks this. C++ says yes until it has rebuilt its buckets, so here always.
        ddp: Any = self._ddp()
        inherited: Any = super()
        return not ddp._has_rebuilt_buckets and bool(inherited._should_finalize_after_backward())

    @outside_dynamo
    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._work_handle = work, use_static_world_size
        super()._set_forward_pass_work_handle(work, use_static_world_size)

    def _remove_autograd_hooks(self) -> None:
        # ddpopt.ddp.ready_hooks may notify this reducer of gradients instead of its own hooks.
        self.is_removed = True
        super()._remove_autograd_hooks()

    @outside_dynamo
    def _set_static_graph(self) -> None:
        super()._set_static_graph()
        self._notes_ready_order = True

    def _forget_ready_order(self) -> None:
        # C++ records each ready gradient until it rebuilds, so here without end: a reference to a parameter
        # for each gradient and step. Only _reset_state clears this record. It also makes the reducer stop
        # expecting a backward, so call it right before prepare_for_backward: _rebuild_buckets is also called
        # between "forward, forward under no_sync" and their common backward. And after accumulation it makes
        # the next backward count again; a static graph recognizes its first backward by that count, and
        # records nothing in it, so there is nothing to clear before a gradient has been marked ready.
        self._has_marked = self._has_marked or any(self.get_backward_stats())
        if self._notes_ready_order and self._has_marked:
            self._check_reducer_finalized()
            self._reset_state()


class PlannedLogger(_c10d.Logger):  # type: ignore[misc]  # torch does not mark its re-exports
    """The logger of a reducer that keeps the buckets it was built with.

    Where DDP would rebuild its buckets, its log says so for these, which monitoring reads as those in use.
    """

    def __init__(self, reducer: PlannedReducer) -> None:
        super().__init__(reducer)
        self._reducer = weakref.ref(reducer)

    def _get_ddp_logging_data(self) -> Any:
        data = super()._get_ddp_logging_data()
        reducer = self._reducer()
        numbers = data.ints_map
        if reducer is not None and reducer.replaces_rebuilt and numbers.get("iteration", 0) >= FIRST_REBUILT:
            place = {reducer.names[id(each)]: number for number, each in enumerate(reducer.parameters)}
            buckets = reducer.plan.buckets
            members = [" ".join(str(place[name]) for name in bucket.params) for bucket in buckets]
            data.ints_map = {**numbers, "has_rebuilt_buckets": 1}
            data.strs_map = {
                **data.strs_map,
                "rebuilt_bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in buckets),
                "rebuilt_per_bucket_param_indices": ", ".join(members),
            }
        return data


@outside_dynamo
def install(ddp: DistributedDataParallel, plan: Plan, hook: Any = None) -> None:
    """Replace a DDP module's reducer by one with the plan's buckets.

    The caller has checked that the plan fits the module, that the module is not in a backward, and that all
    ranks do the same. Communication hooks that were registered through the module are kept.

    Args:
        ddp: the module; its reducer and its logger are replaced.
        plan: its buckets hold each parameter of the module's reducer once.
        hook: a communication hook for this reducer; by default the module's own, if it has one.
    """
    module: Any = ddp  # its private attributes carry no types
    with as_built(ddp):  # C++ does not accept frozen parameters
        names = {key: spec.name for key, spec in specs_by_id(ddp).items()}
        if not {*names.values()}.issuperset(name for bucket in plan.buckets for name in bucket.params):
            names = module.reducer.names  # the module has renamed parameters since
        arguments = _reducer_arguments(module, plan, [*names.values()])
        # nodes that only the old reducer holds would die with it, and so would the hooks on them
        leaves: list[Any] = [get_gradient_edge(parameter).node for parameter in arguments["params"]]
        noted = module._get_ddp_logging_data()
        module.reducer._remove_autograd_hooks()
        watched = module.logger if isinstance(module.logger, WatchedLogger) else None
        # Free the old buckets before making the new ones: after a forward there is no memory for both.
        if watched:
            watched.logger = None
        del module.reducer, module.logger
        with _own_gradients(module, arguments["params"]):
            module.reducer = PlannedReducer(ddp, plan, names, arguments)
        state_of(ddp).planned = weakref.ref(module.reducer)
    module.logger = _logger(module)
    if module.static_graph:
        module._static_graph_delay_allreduce_enqueued = False
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
    if noted.get("join_uneven_inputs"):
        module.logger._set_uneven_input_join()
    if getattr(module, "require_manual_backward_finalization", False):  # torch 2.15
        module.require_manual_backward_finalization = True
    _keep_hooks(module, str(noted.get("comm_hook", "")), hook)
    if watched:
        watched.logger = module.logger
        module.logger = watched
    if any(registered(leaf.register_hook) for leaf in leaves):
        ready_hooks(ddp).take_over()  # DDP's own reducer is notified before users' hooks run


@contextlib.contextmanager
def _own_gradients(ddp: Any, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep gradients in place until DDP has rebuilt its buckets: a new reducer would move them."""
    moved = [] if ddp._has_rebuilt_buckets else [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in moved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in moved:
            parameter.grad = gradient


def _reducer_arguments(ddp: Any, plan: Plan, names: Sequence[str]) -> dict[str, Any]:
    parameters, sparse = ddp._build_params_for_reducer()
    mapping = ddp._build_debug_param_to_name_mapping(parameters)
    planned = planned_reducer(ddp)
    # the module may have lost some since, which DDP goes on to reduce
    if len(parameters) != len(names) and planned is not None:
        parameters = planned.parameters
        sparse = planned.expects_sparse
        mapping = dict(enumerate(names))
    places = {name: place for place, name in enumerate(names)}
    # Pass on all switches that DDP and its reducer have in common; they differ between releases of torch.
    switches = re.findall(r"(\w+): bool", str(Reducer.__init__.__doc__))
    return {switch: getattr(ddp, switch) for switch in switches if hasattr(ddp, switch)} | {
        "params": parameters,
        "bucket_indices": [[places[name] for name in bucket.params] for bucket in plan.buckets],
        "per_bucket_size_limits": [bucket.nbytes for bucket in plan.buckets],
        "process_group": ddp.process_group,
        "expect_sparse_gradients": sparse,
        "bucket_bytes_cap": ddp.bucket_bytes_cap,
        # A static graph finds unused parameters by itself. If both were set, clearing the ready order would
        # also clear the parameters found, and each backward would wait to copy them from the device again.
        "find_unused_parameters": ddp.find_unused_parameters and not ddp.static_graph,
        "param_to_name_mapping": mapping,
    }


def _logger(ddp: Any) -> Any:
    logger = PlannedLogger(ddp.reducer)
    ddp.reducer.set_logger(logger)
    devices = ddp.device_ids or [], -1 if ddp.output_device is None else ddp.output_device
    syncs_norms = any(isinstance(module, nn.SyncBatchNorm) for module in ddp.module.modules())
    options = ddp.broadcast_buffers, syncs_norms, ddp.static_graph
    logger.set_construction_data_and_log(type(ddp.module).__name__, *devices, *options)
    return logger


def _keep_hooks(ddp: Any, name: str, instead: Any) -> None:
    # A reducer takes one hook, and DDP's log has its name. Python hooks are also in a list; a copied module's
    # list has the hooks of the original, which torch does not register for the copy.
    kind = _c10d.BuiltinCommHookType.__members__.get(name.rpartition(".")[2])
    if instead is not None:
        _c10d._register_comm_hook(ddp.reducer, None, instead)
    elif kind is not None and str(kind) == name:
        _c10d._register_builtin_comm_hook(ddp.reducer, kind)
    elif name:
        hook, state = ddp._comm_hooks[-1]
        _c10d._register_comm_hook(ddp.reducer, state, hook)
    if name:
        ddp.logger._set_comm_hook_name(name)
    # DDP registers these optimizers with its reducer only at the first forward.
    if ddp._lazy_init_ran and any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters):
        ddp.reducer._set_optimizer_in_backward()
