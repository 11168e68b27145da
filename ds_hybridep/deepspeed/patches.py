# SPDX-License-Identifier: Apache-2.0
"""The table of everything that this package changes in foreign code, and the code that makes and undoes a change.

    TABLE      all changes that are allowed, and why
    Patches    the changes of one attachment; `undo` takes them back, last change first

Modules are patched, not replaced: parameter names, identities and the gate stay DeepSpeed's, so checkpoints load with
and without the block.

Rows with `until` "detach" change one engine, its optimizer or its layers.  Rows with "last detach" change a class that
all engines of the process share, as long as any engine is attached.  Those with "exit" stay; most are made by the
import hook (`_autoload`), and leave an engine without the block as it was.  What a row with "AutoEP" names is
changed only while AutoEP makes its layers.

Nothing here keeps an engine alive.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any, Literal

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO_MODULE = "deepspeed.runtime.zero.stage_1_and_2"
ZERO_OPTIMIZER = f"{ZERO_MODULE}:DeepSpeedZeroOptimizer"
BF16_MODULE = "deepspeed.runtime.bf16_optimizer"
MOE_LAYER = "deepspeed.moe.sharded_moe:MOELayer"
AUTOEP_LAYER = "deepspeed.module_inject.auto_ep_layer:AutoEPMoELayer"
CHECKPOINT = "deepspeed.checkpoint.deepspeed_checkpoint:DeepSpeedCheckpoint"
UNIVERSAL = "deepspeed.checkpoint.autoep_universal"
DS_REPORT = "deepspeed.env_report"
MODULE = "torch.nn:Module"
OPTIMIZER = "torch.optim:Optimizer"
SAVED_TENSORS = "torch.autograd.graph:saved_tensors_hooks"
TORCH_CHECKPOINTING = "torch.utils.checkpoint:CheckpointFunction"
DEEPSPEED_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing:CheckpointFunction"
TRAINER = "transformers.trainer:Trainer"
PRE_TRAINED = "transformers.modeling_utils:PreTrainedModel"
ACCELERATOR = "accelerate.accelerator:Accelerator"
GENERATION = "transformers.generation.utils:GenerationMixin"
FILE_BATON = "torch.utils.file_baton:FileBaton"
TRANSFORMERS_OUTPUTS = "transformers.utils.output_capturing"
PEFT_MODEL = "peft.peft_model:PeftModel"
PEFT_TUNER = "peft.tuners.lora.model:LoraModel"

Until = Literal["AutoEP", "detach", "last detach", "exit"]
Replacement = Callable[..., Any]  # called with the original first, then with the call's own arguments
_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One row of `TABLE`."""

    owner: str  # "module:Class", or a module, that has the attribute
    attribute: str
    why: str
    until: Until = "detach"
    parameters: tuple[str, ...] = ()  # method parameters that the replacement relies on
    is_method: bool = True  # False for an attribute that only instances have


# Parameters of methods below.
_SUMS = "bucket", "communication_data_type", "process_group"
_LOADED = "load_optimizer_states", "load_module_only"
_LAYERS = ("autoep_layers_metadata",)
_FILE = "save_dir", "save_filename", "exclude_frozen_parameters"
_OPTIONAL = "transformers.", "peft.", "accelerate."  # checked where a program has imported them
_SAVED = "is_main_process", "state_dict"
_COMPILED = "backend", "compile_kwargs", "schedule", "compiled_autograd_enabled"
_UNFINISHED = "this_peer_finished", "synced_gpus"
_OFFLOADED = "include", "device", "pin_memory", "non_blocking"

TABLE = (
    # The import hook makes these.
    Patch(ENGINE, "_configure_distributed_model", "an engine with the block attaches itself", "exit", ("model",)),
    Patch(ENGINE, "_configure_expert_parallel", "peft's wrappers go before AutoEP looks", "exit", ("model",)),
    Patch(ENGINE, "__init__", "undo a start that fails; refuse a block that cannot work", "exit", ("config_class",)),
    Patch(CHECKPOINT, "_lightweight_autoep_metadata", "ds_to_universal learns of adapters", "exit", ("model_state",)),
    Patch(UNIVERSAL, "get_autoep_zero12_expert_param_info", "and takes them along", "exit", _LAYERS),
    Patch(DS_REPORT, "op_report", "ds_report lists the kernels", "exit"),
    Patch(FILE_BATON, "wait", "a start that waits for a build that was interrupted says so", "exit"),
    # Of one model whose experts have adapters; see adapter_switch.
    Patch(PEFT_TUNER, "merge_adapter", "refused: it would merge other adapters only", "exit"),
    Patch(PEFT_TUNER, "_unload_and_optionally_merge", "refused: the same, for good", "exit"),
    Patch(PEFT_TUNER, "delete_adapter", "refused: experts would keep theirs", "exit"),
    Patch(PEFT_TUNER, "inject_adapter", "refused: experts would get no second adapter", "exit"),
    Patch(PEFT_TUNER, "set_requires_grad", "refused: it would freeze other adapters only", "exit"),
    Patch(PEFT_TUNER, "set_adapter", "refused for another adapter, which experts do not have", "exit"),
    Patch(PEFT_TUNER, "_enable_peft_forward_hooks", "refused: one adapter for each sequence", "exit"),
    Patch(PEFT_MODEL, "load_adapter", "refused: experts would keep theirs", "exit"),
    # While AutoEP makes its layers, from transformers 5.23 on.
    Patch(TRANSFORMERS_OUTPUTS, "_CAN_RECORD_REGISTRY", "AutoEP takes it for a plain dict", "AutoEP", is_method=False),
    # The engine's optimizer; see param_groups.
    Patch(ENGINE, "_configure_optimizer", "groups get names; frozen experts need no group"),
    Patch(ENGINE, "_configure_zero_optimizer", "experts get groups of their own in a script's optimizer"),
    Patch(ENGINE, "_configure_bf16_optimizer", "the same as under ZeRO", parameters=("optimizer",)),
    Patch(ENGINE, "_configure_fp16_optimizer", "the same as under ZeRO", parameters=("optimizer",)),
    # The engine's optimizer step.
    Patch(ENGINE, "_take_model_step", "weights are shipped after each step, gradients must be back before it"),
    Patch(ENGINE, "_backward_prologue_per_tensor", "codecs undo what they noted of gradients that it replaces"),
    Patch(OPTIMIZER, "step_pre_hook", "from then on a step is not skipped any more", is_method=False),
    Patch(ENGINE, "zero_grad", "sums of replicas are forgotten with the owners' gradients"),
    Patch(ZERO_OPTIMIZER, "zero_grad", "sums of replicas are forgotten with the owners' gradients"),
    Patch(MODULE, "zero_grad", "the model's own zero_grad forgets sums of replicas too", "last detach"),
    Patch(MODULE, "forward_pre_hook", "notices gradients set to None; counts tokens for plans", is_method=False),
    # The layers.
    Patch(MODULE, "_hybridep", "what a MoE layer's forward below looks for", is_method=False),
    Patch(MODULE, "forward_hook", "notices a layer whose own forward leaves ours out", is_method=False),
    Patch(MOE_LAYER, "forward", "routed experts run over expert domains", "last detach"),
    Patch(AUTOEP_LAYER, "forward", "routed experts run over expert domains", "last detach", ("hidden_states",)),
    Patch(AUTOEP_LAYER, "__deepcopy__", "a copy shares groups of ranks, which cannot be copied", is_method=False),
    Patch(SAVED_TENSORS, "__enter__", "see checkpoint_guard", "last detach"),
    Patch(TORCH_CHECKPOINTING, "apply", "see checkpoint_guard", "last detach"),
    Patch(DEEPSPEED_CHECKPOINTING, "apply", "see checkpoint_guard", "last detach"),
    # What scripts do between steps.
    Patch(GENERATION, "generate", "ranks go on until all texts have ended", "last detach", ("synced_gpus",)),
    Patch(GENERATION, "_has_unfinished_sequences", "and say so over our link", "last detach", _UNFINISHED),
    Patch(
        GENERATION, "_update_model_kwargs_for_generation", "texts that have ended", "last detach", ("model_kwargs",)
    ),
    Patch(ENGINE, "offload_states", "replicas leave the device too", parameters=_OFFLOADED),
    Patch(ENGINE, "reload_states", "and come back with them", parameters=("non_blocking",)),
    # Checkpoints and models that are written.
    Patch(ENGINE, "save_checkpoint", "the state of codecs, adapters and plan is saved too", parameters=("tag",)),
    Patch(ENGINE, "load_checkpoint", "and loaded; then weights are shipped", parameters=_LOADED),
    Patch(ENGINE, "load_module_state_dict", "files hold only the adapters of one rank", parameters=("checkpoint",)),
    Patch(MODULE, "load_state_dict_post_hook", "weights that were loaded are shipped", is_method=False),
    Patch(ENGINE, "save_16bit_model", "it would write the experts of rank 0 only", parameters=_FILE),
    Patch(ENGINE, "_zero3_consolidated_16bit_state_dict", "refused by DeepSpeed", parameters=_FILE[2:]),
    Patch(ACCELERATOR, "get_state_dict", "as save_16bit_model above", "last detach", ("model",)),
    Patch(TRAINER, "save_model", "as save_16bit_model above", "last detach", ("output_dir", "_internal_call")),
    Patch(PRE_TRAINED, "save_pretrained", "it would write the experts of one rank", "last detach", _SAVED),
    Patch(PEFT_MODEL, "save_pretrained", "the same, of adapters of experts", "last detach", _SAVED[:1]),
    # Newer versions of peft have it; older ones look at names.
    Patch(PEFT_TUNER, "_get_adapter_state_dict", "finds adapters of experts", "last detach", is_method=False),
    Patch(MODULE, "state_dict_pre_hook", "warns of experts of one rank; see other_saves", is_method=False),
    # The end, and what is refused.
    Patch(ENGINE, "destroy", "connections and threads end with the engine"),
    Patch(ENGINE, "__del__", "an engine that is dropped gives its layers back, and waits for nobody", "last detach"),
    Patch(ENGINE, "compile", "refused with DeepCompile or compiled autograd", parameters=_COMPILED),
    Patch(ENGINE, "step", "refused once a later engine has the same layers: copies would not hear of it", "exit"),
    Patch(ENGINE, "coalesce_grad_reduction", "refused: gradients of replicas would come too late"),
    # Dense parameters, and experts with several copies.
    Patch(ENGINE, "_get_gradients_for_reduction", "says whose gradients ZeRO 0 is about to sum"),
    Patch(ENGINE, "allreduce_bucket", "dense sums of ZeRO 0 go level by level", parameters=("bucket", "dp_group")),
    Patch(ZERO_OPTIMIZER, "independent_gradient_partition_epilogue", "ZeRO 2's sums cross slow levels in the end"),
    Patch(ZERO_OPTIMIZER, "allreduce_and_scatter", "says whose gradients a bucket holds, for whom", parameters=_SUMS),
    Patch(ZERO_OPTIMIZER, "allreduce_bucket", "a sum goes level by level, to its owner only", parameters=_SUMS),
    Patch(ZERO_OPTIMIZER, "reduce_ipg_grads", "gradients leave for other sites while the backward runs"),
    Patch(ZERO_OPTIMIZER, "has_overflow", "the flag and the norms of all parameter groups travel together"),
    Patch(ZERO_OPTIMIZER, "scaled_global_norm", "the same, where nobody has asked for the flag"),
    Patch(ZERO_OPTIMIZER, "get_grad_norm_direct", "norms have come with the flag", parameters=("gradients",)),
    Patch(ZERO_OPTIMIZER, "complete_grad_norm_calculation_for_cpu_offload", "and those of gradients on the host"),
    Patch(ZERO_OPTIMIZER, "_average_expert_grad_norms", "norms of experts are equal on all ranks"),
    Patch(ZERO_MODULE, "all_gather_dp_groups", "gathers of ZeRO 1 and 2 go level by level", "last detach"),
    Patch(BF16_MODULE, "all_gather_dp_groups", "gathers of BF16_Optimizer go level by level", "last detach"),
)
_ROWS = {(row.owner, row.attribute) for row in TABLE}
_shared: dict[tuple[str, str], tuple[weakref.WeakSet["Patches"], Callable[[], None]]] = {}  # users, undo


class Patches:
    """What one attachment has changed."""

    def __init__(self) -> None:
        self.is_on = True  # until `undo`
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: str, attribute: str, instance: Any, replacement: Replacement) -> None:
        """Replace a method of one instance.  A user's own wrapper may call it even after `undo`."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return replacement(original, *args, **kwargs) if self.is_on else original(*args, **kwargs)

            return call

        self.note(owner, attribute, _replace(instance, attribute, make))

    def put(self, owner: str, attribute: str, instance: Any, value: Any) -> None:
        """Give an attribute of one instance another value."""
        before = vars(instance).get(attribute, _ABSENT)
        setattr(instance, attribute, value)

        def undo() -> None:
            if vars(instance).get(attribute) is value:
                _restore(instance, attribute, before)

        self.note(owner, attribute, undo)

    def share(self, owner: str, attribute: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method of a class by `make(original)` until the last attachment is undone.

        A user's own wrapper may call it even later, so it must act like `original` when nothing is attached.
        """
        key = owner, attribute
        if key not in _shared:
            _shared[key] = weakref.WeakSet(), _replace(find(owner), attribute, make)
        users, undo = _shared[key]
        if self in users:
            return
        users.add(self)

        def give_up() -> None:
            users.discard(self)
            if not users:
                del _shared[key]
                undo()

        self.note(owner, attribute, give_up)

    def note(self, owner: str, attribute: str, undo: Callable[[], None]) -> None:
        """Note a change that was already made, and the function that undoes it."""
        assert (owner, attribute) in _ROWS, f"{owner}.{attribute} has no row in the table"
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all changes, last change first."""
        self.is_on = False
        while self._undo:
            self._undo.pop()()


def find(owner: str) -> Any:
    """Return the class or module of a row."""
    module, _, name = owner.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def misfits(rows: tuple[Patch, ...] = TABLE) -> list[str]:
    """Return what rows rely on but the installed DeepSpeed or torch does not have."""
    missing = []
    for row in rows:
        if row.owner.startswith(_OPTIONAL) and row.owner.split(":")[0] not in sys.modules:
            continue
        method = None
        try:
            method = getattr(find(row.owner), row.attribute) if row.is_method else find(row.owner)
        except (ImportError, AttributeError):
            if row.owner not in (AUTOEP_LAYER, UNIVERSAL):  # only models with such layers need it, and they have it
                missing.append(f"{row.owner}.{row.attribute}")
        if row.parameters and method is not None:
            known = inspect.signature(method).parameters
            missing += [f"{row.owner}.{row.attribute}({name}=)" for name in row.parameters if name not in known]
    return missing


def _replace(
    owner: Any, attribute: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a method by `make(original)`.  Returns the function that puts the method back.

    A class method stays one: `original` and what `make` returns take the class first, which may be a subclass.
    """
    original, before = getattr(owner, attribute), vars(owner).get(attribute, _ABSENT)
    is_class_method = isinstance(owner, type) and inspect.ismethod(original)
    made = wraps(original)(make(original.__func__ if is_class_method else original))
    setattr(owner, attribute, classmethod(made) if is_class_method else made)
    known = weakref.ref(made)  # `made` holds the method, and so the instance

    def undo() -> None:
        try:
            now = vars(owner).get(attribute)
        except ReferenceError:  # an engine that was dropped
            return
        # Else it is a user's wrapper, which goes on calling ours.
        if now is not None and getattr(now, "__func__", now) is known():
            _restore(owner, attribute, before)

    return undo


def _restore(owner: Any, attribute: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, before)
