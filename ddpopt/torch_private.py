"""A list of the private names of torch that ddpopt uses, each with what fails without it.

Nothing is wrapped here: the modules use these names directly. A release of torch may rename any of them.
`require_supported` looks them all up before a module is compiled, so that such a release gives one error that
names them, not an `AttributeError` in the middle of training.

Invariant: looking the names up changes nothing in torch.
"""

import contextlib
import pkgutil
import platform
from collections.abc import Mapping

from ddpopt.errors import UnsupportedError

RELEASES = "torch 2.11 to 2.15"
JOIN = "ranks with different numbers of steps cannot train together"
PLANS = "buckets cannot be planned as DDP fills them"
FOLLOWS = "DDP cannot follow a plan"
EARLY = "inline cannot hand a gradient over during backward"
NAMES: Mapping[str, str] = {
    "torch.Tensor._use_count": "inline copies every gradient",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": "hooks are not kept",
    "torch._C._current_autograd_node": EARLY,
    "torch._C._current_graph_task_id": EARLY,
    "torch._C._functorch.is_functorch_wrapped_tensor": PLANS,
    "torch._C._set_grad_enabled": "cut graphs cannot be proved",
    "torch._C._storage_Use_Count": "inline copies every gradient",
    "torch._C._will_engine_execute_node": EARLY,
    "torch._dynamo.backends.distributed.DDPOptimizer": "torch's optimizer cannot be replaced or explained",
    "torch._dynamo.backends.registry._COMPILER_FNS": "a backend that calls Inductor loses overlap",
    "torch._dynamo.trace_rules.check": "modules that Dynamo skips cannot be compiled",
    "torch._functorch.compilers.nop": EARLY,
    "torch._functorch.config.force_non_lazy_backward_lowering": "a backend that calls Inductor loses overlap",
    "torch._functorch._aot_autograd.collect_metadata_analysis": "views that leave a segment come back wrong",
    "torch._functorch._aot_autograd.descriptors.PlainAOTInput": EARLY,
    "torch._guards._TLS": "graphs cannot be cut",
    "torch._inductor.ir.FallbackKernel": "inline cannot run on Inductor",
    "torch._logging.getArtifactLogger": "TORCH_LOGS cannot show plans",
    "torch._logging.trace_structured": "TORCH_TRACE cannot show plans",
    "torch._subclasses.functional_tensor.FunctionalTensor": EARLY,
    "torch.autograd.graph._engine_run_backward": EARLY,
    "torch.distributed.Reducer._autograd_hook": EARLY,
    "torch.distributed.Reducer._check_reducer_finalized": FOLLOWS,
    "torch.distributed.Reducer._get_zeros_like_grad_buckets": PLANS,
    "torch.distributed.Reducer._remove_autograd_hooks": FOLLOWS,
    "torch.distributed.Reducer._reset_state": FOLLOWS,
    "torch.distributed.Reducer._set_ddp_runtime_logging_sample_rate": FOLLOWS,
    "torch.distributed.Reducer._set_forward_pass_work_handle": FOLLOWS,
    "torch.distributed.Reducer._set_optimizer_in_backward": FOLLOWS,
    "torch.distributed.Reducer._set_static_graph": FOLLOWS,
    "torch.distributed._compute_bucket_assignment_by_size": PLANS,
    "torch.distributed.distributed_c10d._get_default_store": "verification cannot compare ranks",
    "torch.distributed.distributed_c10d._get_process_group_store": "ranks cannot agree on a plan",
    "torch.fx._lazy_graph_module._use_lazy_graph_module": "graphs cannot be cut",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "graphs have no module",
    "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer": FOLLOWS,
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": PLANS,
}
"""The undocumented parts of torch that ddpopt uses, by dotted name."""
STEP: Mapping[str, str] = {
    "torch._dynamo.comptime.comptime": "the DDP modules of a step are not known",
    "torch.distributed.Reducer._push_all_rebuilt_params": JOIN,
    "torch.distributed.Reducer._rebuild_buckets": JOIN,
    "torch.distributed.algorithms.join.Join.notify_join_context": JOIN,
    "torch.nn.parallel.DistributedDataParallel._check_global_requires_backward_grad_sync": JOIN,
    "torch.nn.parallel.DistributedDataParallel._check_sync_bufs_pre_fwd": JOIN,
    "torch.nn.parallel.DistributedDataParallel._sync_buffers": JOIN,
    "torch._dynamo.graph_break": "Adam's step breaks the graph",
    "torch._dynamo.output_graph.OutputGraph._validate_outputs_safe_for_autograd_nodes": (
        "Dynamo refuses a step that returns its loss"
    ),
    "torch._dynamo.pgo.auto_dynamic": "a schedule compiles a step again for each learning rate",
    "torch._dynamo.polyfills.accumulate_grad": "gradients that DDP averages are not known",
    "torch._dynamo.side_effects.SideEffects.register_hook": "hooks on tensors are lost silently",
    "torch._fused_adagrad_": "a fused Adagrad breaks the graph",
    "torch._fused_adam_": "a fused Adam breaks the graph",
    "torch._fused_adamw_": "a fused AdamW breaks the graph",
    "torch._fused_sgd_": "a fused SGD breaks the graph",
    "torch.optim.adagrad._fused_adagrad": "a fused Adagrad breaks the graph",
    "torch.optim.adam._fused_adam": "a fused Adam breaks the graph",
    "torch.optim.sgd._fused_sgd": "a fused SGD breaks the graph",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map": "Dynamo traces none of what replaces its functions",
    "torch._dynamo.trace_rules.get_mod_inlinelist": "GradScaler breaks the graph",
    "torch.amp.grad_scaler.GradScaler._maybe_opt_step": "GradScaler breaks the graph",
    "torch.amp.grad_scaler.OptState": "GradScaler breaks the graph",
    "torch._dynamo.variables.ConstantVariable.create": "a guard may read a constant where it no longer is",
    "torch._dynamo.variables.TensorVariable._collect_backward_inputs": "hooks run in another order",
    "torch._dynamo.variables.TensorVariable.dynamic_getattr": "hooks on parameters do not run",
    "torch._dynamo.variables.TensorVariable.method_attr_grad": "a gradient that is None is read as another's",
    "torch._dynamo.variables.builder.OptimizerVariable": "optimizers break the graph",
    "torch._dynamo.variables.builder.handle_traced_output": "a parameter that is returned loses its grad",
    "torch._dynamo.variables.builder.process_automatic_dynamic": "a schedule compiles a step again",
    "torch._dynamo.variables.dicts.SideEffectsProxyDict": "Dynamo forgets attributes after it traced a hook",
    "torch._inductor.choices.InductorChoices.can_fuse": "collectives start late",
    "torch._inductor.custom_graph_pass.get_custom_graph_passes": "Inductor reorders collectives",
    "torch._inductor.virtualized.V.set_choices_handler": "collectives start late",
    "torch.fx.passes._tensorify_python_scalars._is_tensorify_enabled": "Inductor takes numbers as fixed",
    "torch.nn.parallel.distributed._find_tensors": "what a forward returned is not known",
    "torch.ops._c10d_functional.all_reduce": "a graph has no all-reduce",
    "torch.utils._python_dispatch._disable_current_modes": "modes of the user see fake tensors",
}
"""What a step in one graph needs besides; `ddpopt.train_step` asks for torch 2.13 or newer first."""


def require_supported(names: Mapping[str, str] = NAMES) -> None:
    """Fail unless the installed torch has all the names that ddpopt uses.

    Args:
        names: each with what fails without it.

    Raises:
        UnsupportedError: some are missing; says which, what fails without them, and which releases have them.
    """
    import torch

    lacking = dict(names)
    for name in names:
        with contextlib.suppress(ImportError, AttributeError):
            pkgutil.resolve_name(name)
            del lacking[name]
    if lacking:
        lines = "\n".join(f"  {name}: {lost}" for name, lost in lacking.items())
        raise UnsupportedError(
            f"expected {RELEASES}, got torch {torch.__version__} (Python {platform.python_version()}), which "
            f"lacks {len(lacking)} of the private names that ddpopt uses:\n{lines}\n"
            "Install one of these releases, or a newer ddpopt."
        )
