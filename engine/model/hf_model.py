"""HfModel: any other decoder, computed by transformers over our paged cache.

transformers' modules run one flat batch of all sequences. Their AttentionInterface calls back here: K and V are written
into blocks and queries attend to them, with a GPU's kernels if these have the model's head size and dtype, else with
the reference. Each layer's window is taken from the mask that transformers would make for it, so nothing is guessed
from the config. A model that keeps another kind of state, or attends in a way that is not implemented, is refused by
name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.files.hf_config import eos_token_ids, generation_defaults, not_followed, refuse_quantised
from engine.files.model_config import ModelConfig
from engine.files.model_files import ModelFiles, Progress
from engine.machine import free_memory
from engine.model.kv_cache import check_cpu_memory
from engine.ops import get_ops
from engine.ops.base import RopeTable, StepInput, StepPlan
from engine.ops.cpu.threads import TorchThreads
from engine.ops.fp8 import Kv, store
from engine.ops.reference import ReferenceOps, attend
from engine.sizing.kv_shape import KvShape

if TYPE_CHECKING:
    from engine.ops.nvidia.triton import TritonOps

NAME = "kvtop"
NOTICE = "runs through transformers: slower, no fused ops"

INSTEAD = "take another model; Llama, Mistral, Qwen, Gemma, Phi-3, OLMo and GPT-2 run"
"""The advice in a refusal."""

_STATE = "keeps a state instead of K and V, which is not implemented"
_NO_WAY_IN = "transformers gives no way into its attention"
_UNPAGED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("bloom", "falcon", "gpt_neo", "mpt"), _NO_WAY_IN),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "latent attention (MLA) is not implemented"),
}
"""By model_type: refused before loading. Others are noticed while loading."""

_PLAIN = {"position_ids", "cache_position", "position_embeddings"}
"""Tensors that transformers passes to an attention function and that change nothing in it."""


class HfOps(ReferenceOps):
    """Copies, sampling and attention without kernels; transformers computes the rest."""

    name = "transformers"


@dataclass(slots=True)
class _Step:
    """What the attention of one forward needs. `seen`: layers that have called. `plans`: by window; layers with the
    same window share one."""

    batch: StepInput
    cache: Kv
    model: HfModel
    seen: set[int] = field(default_factory=set)
    plans: dict[int | None, StepPlan] = field(default_factory=dict)

    def attend(self, q: Tensor, kv: Kv, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """See engine.ops.reference.attend."""
        ops = self.model.ops
        if isinstance(ops, HfOps):
            return attend(q, kv, self.batch, ops.wide, scale, window=window, softcap=softcap)
        if window not in self.plans:
            nothing = torch.empty(0, device=ops.device)
            self.plans[window] = ops.plan(self.batch, RopeTable(nothing, nothing), window)
        own = q.to(ops.dtype)
        own = own if own.stride(-1) == 1 else own.contiguous()
        return ops.attend(own, kv, self.plans[window], scale, window, softcap).to(q.dtype)


_current: ContextVar[_Step] = ContextVar("kvtop_step")
"""Not an argument of the forward, because not every model passes its arguments on to its layers."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T,
    heads, dim]."""
    step = _current.get()
    name, c = step.model.config.architecture, step.model.config
    for what, given in more.items():
        if isinstance(given, Tensor) and what not in _PLAIN:
            raise _refusal(name, f"attention with {what:.40} is not implemented")
    expected = (c.num_kv_heads, query.shape[2], c.head_dim)
    if tuple(key.shape[1:]) != expected or tuple(value.shape[1:]) != expected:
        shapes = f"{list(key.shape[1:])} and {list(value.shape[1:])}"
        raise _refusal(name, f"K and V of {shapes} are not implemented")
    if attention_mask is not None and attention_mask.shape != (1, 1, 1, 1):
        raise _refusal(name, "its own attention mask is not implemented")
    if not getattr(module, "is_causal", True):
        raise _refusal(name, "attention that is not causal is not implemented")
    layer = int(getattr(module, "layer_idx", -1))
    step.seen.add(layer)
    kv, b = step.cache[layer], step.batch
    store(kv, b.slots // kv.shape[3], b.slots % kv.shape[3], *(x[0].transpose(0, 1) for x in (key, value)))
    scale = c.head_dim**-0.5 if scaling is None else float(scaling)
    window = None if attention_mask is None else int(attention_mask)
    return step.attend(query[0].transpose(0, 1), kv, scale, window, softcap)[None], None


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
    """In place of a mask: the window of the layers that get it, or None for all earlier tokens."""
    return None if local_size is None else torch.full((1, 1, 1, 1), int(local_size))


class HfModel:
    """A TorchRunner's model instead of Decoder. `hf`: a causal language model made with `NAME` attention."""

    def __init__(
        self, config: ModelConfig, hf: Any, device: torch.device, dtype: torch.dtype,
        engine: EngineConfig | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.notice = "; ".join(filter(None, (NOTICE, config.notice)))
        self.ops = _ops(config, device, dtype, engine or EngineConfig())
        self.hf = hf.to(device).eval()
        self._threads = TorchThreads() if device.type == "cpu" else None
        self.weights_bytes = sum(p.nbytes for p in hf.parameters())  # a tied head is one parameter
        self._picks_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters

    def reach(self, positions: int) -> None:
        """Nothing to do: transformers makes its tables itself, and `load` has checked how large they are."""

    def forward(self, batch: StepInput, cache: Kv) -> Tensor:
        """See Decoder.forward."""
        if self._threads is not None:
            self._threads.follow()
        step = _Step(batch, cache, self)
        token = _current.set(step)
        try:
            rows = {"logits_to_keep": batch.logit_rows} if self._picks_rows else {}
            ids, positions = batch.token_ids[None], batch.positions.long()[None]
            logits: Tensor = self.hf(input_ids=ids, position_ids=positions, use_cache=False, **rows).logits[0]
        finally:
            _current.reset(token)
        if step.seen != set(range(self.config.num_layers)):
            some = f"only {len(step.seen)} of {self.config.num_layers} layers attend in a way that is implemented"
            raise _refusal(self.config.architecture, some)
        return logits if self._picks_rows else logits[batch.logit_rows]


def _ops(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, engine: EngineConfig
) -> HfOps | TritonOps:
    """Kernels on a GPU, or if the config asks for them; else the reference. Raises SetupError for a back end that
    is not available."""
    backend = engine.attention_backend
    if backend == "flashinfer":  # plans a window once a step, and layers differ in theirs
        raise SetupError(
            f"--attention-backend flashinfer: {model.name:.60} runs through transformers; take flash-attn or auto"
        )
    asked = engine.ops == "triton" or backend != "auto"
    if asked or (device.type == "cuda" and engine.ops == "auto"):
        try:
            ops = get_ops(
                "triton", device, dtype, model, fp8_kv=engine.kv_cache_dtype == "fp8", attention=backend,
                block_size=engine.block_size,
            )  # fmt: skip
        except SetupError:
            if asked:
                raise
        else:
            ops.name = HfOps.name
            return cast("TritonOps", ops)
    return HfOps(device, dtype)


# ------------------------------------------------------------------------------------------ loading


def load(
    files: ModelFiles,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    engine: EngineConfig | None = None,
) -> HfModel:
    """The model of `files`. engine: which kernels attend. Raises SetupError: what transformers does not know
    or we cannot page."""
    raw = files.config or {}
    name = _name(raw)
    refuse(raw)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # it would paint over the dashboard
    register()
    progress(0, 1, f"loading {files.name}: {NOTICE}")
    try:
        hf_config = AutoConfig.from_pretrained(files.folder, local_files_only=True)
        config = model_config(hf_config, raw, files)
        _check_memory(hf_config, device, dtype)
        hf, found = AutoModelForCausalLM.from_pretrained(
            files.folder, config=hf_config, dtype=dtype, attn_implementation=NAME, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
        _check_loaded(name, found)
    except SetupError:
        raise
    except (ValueError, KeyError, ImportError, OSError, RuntimeError) as e:
        raise _refusal(
            name, f"neither kvtop nor transformers runs it ({' '.join(str(e).split()):.50})"
        ) from e
    progress(1, 1, f"loading {files.name}: {NOTICE}")
    return HfModel(config, hf, device, dtype, engine)


def _check_memory(hf_config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SetupError where the model would not fit. Counts all tensors that transformers would make from this
    config, on a device without memory: also the masks and positions of a context of any length (GPT-BigCode's
    mask has a value for each pair of positions)."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=NAME)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    check_cpu_memory(sum(t.nbytes for t in tensors.values()), None, free)


def _check_loaded(name: str, found: Mapping[str, Any]) -> None:
    """Raises SetupError for a tensor that is missing, which transformers would draw at random, or for one of a layer
    that the config does not have, which it would leave out."""
    for tensor in sorted(map(str, found["missing_keys"])):
        raise SetupError(f"{name}: tensor {tensor:.60} is missing; the model is incomplete, fetch it again")
    for tensor in sorted(map(str, found["unexpected_keys"])):
        if re.search(r"\.\d+\.", tensor) and not tensor.endswith(("inv_freq", "attn.bias", "masked_bias")):
            raise SetupError(
                f"{name}: tensor {tensor:.60} has no place in this config; fetch the files again"
            )


def register() -> None:
    """Makes NAME an attention of transformers. A second call changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _name(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0] if isinstance(named, list) and named else config.get("model_type"))[:60]


def _refusal(name: str, why: str) -> SetupError:
    return SetupError(f"{name:.40}: {why:.75}; {INSTEAD}")


def refuse(config: Mapping[str, Any]) -> None:
    """Raises SetupError for a config.json that names what this path would compute wrongly or not at all."""
    name = _name(config)
    if why := _UNPAGED.get(str(config.get("model_type"))):
        raise _refusal(name, why)
    refuse_quantised(config)
    for key in ("vision_config", "audio_config", "speech_config"):
        if config.get(key):
            raise SetupError(f"{name} is multimodal ({key}): kvtop runs text-only decoders")
    if config.get("auto_map"):
        raise SetupError(f"{name} brings code of its own (auto_map), which kvtop never runs")
    if config.get("use_bidirectional_attention"):
        raise _refusal(name, "attention in both directions is not implemented")
    kinds = config.get("layer_types") or ()
    other = {str(k) for k in kinds} - {"full_attention", "sliding_attention"}
    if config.get("attention_chunk_size"):
        other.add("chunked_attention")
    if other:
        raise _refusal(name, f"{', '.join(sorted(other)):.45} layers are not implemented")
    shape = KvShape.from_config(config)
    if shape.attention == "latent":
        raise _refusal(name, "latent attention (MLA) is not implemented")
    if shape.holding_layers != shape.layers:
        raise _refusal(name, "layers that share or keep no KV are not implemented")


def model_config(hf_config: Any, raw: Mapping[str, Any], files: ModelFiles) -> ModelConfig:
    """The engine's view of a transformers config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = _name(raw)
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(name, "no causal language model for transformers")
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]._supports_attention_backend:
        raise _refusal(name, _NO_WAY_IN)
    shape = KvShape.from_config({**hf_config.to_dict(), **raw})
    heads, hidden = shape.heads, hf_config.hidden_size
    config = ModelConfig(
        architecture=str(hf_config.model_type),
        vocab_size=hf_config.vocab_size,
        hidden_size=hidden,
        intermediate_size=getattr(hf_config, "intermediate_size", None) or 4 * hidden,
        num_layers=shape.layers,
        num_heads=heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position or 2048,
        eos_token_ids=eos_token_ids(raw, files.generation_config),
        bos_token_id=getattr(hf_config, "bos_token_id", None),
        name=files.name,
        generation=generation_defaults(files.generation_config),
        notice=not_followed(files.generation_config),
    )
    return replace(config, max_position_embeddings=_constant_rope(hf_config, config.max_position_embeddings))


def _constant_rope(hf_config: Any, longest: int) -> int:
    """Positions over which the rotary frequencies do not depend on how long the batch's longest sequence
    is: LongRoPE changes them past its original length, and then a cached K would depend on its batch."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for part in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings") or getattr(
                hf_config, "original_max_position_embeddings", None
            )
            longest = min(longest, original or longest)
    return longest
