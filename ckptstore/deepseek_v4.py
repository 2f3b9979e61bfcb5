"""Declared mappings between the namings of DeepSeek-V4: native, Hugging Face, Megatron.

Each is called `WANTED_FROM_STORED`. The native names are those of the published checkpoints, in high precision
(no `.scale` tensors). The Hugging Face ones are those of `DeepseekV4ForCausalLM` in transformers 5.24, whose
parameters a test lists; it has no multi-token-prediction block, so `mtp.*` keep their names there. The
Megatron ones are those that public Megatron trainers of the model exchange weights by (`mlp.experts.
linear_fc1.weight{e}`: gate, then up); no Megatron is run here to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptstore.arrangement import Side, concat, stack
from ckptstore.mapping import TensorMap

_EXPERT = "layers.{i}.ffn.experts.{e}"
_SHARED = "layers.{i}.ffn.shared_experts"

_HF_TOP: dict[Side | str, Side | str] = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_HF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
_MEGATRON = "module.module."
_MEGATRON_TOP = {
    "embed.weight": "embedding.word_embeddings.weight",
    "head.weight": "output_layer.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "hc_head_fn": "decoder.hc_head_params.hc_head_fn",
    "hc_head_base": "decoder.hc_head_params.hc_head_base",
    "hc_head_scale": "decoder.hc_head_params.hc_head_scale",
}
_MEGATRON_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    **{
        f"hc_{part}_{name}": f"hc_{part}_{name}"
        for part in ("attn", "ffn")
        for name in ("fn", "base", "scale")
    },
    **{
        f"attn.{name}": f"self_attention.{name}"
        for name in (
            *("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight"),
            *("wo_a.weight", "wo_b.weight", "attn_sink"),
            *(
                f"{at}.{name}"
                for at in ("compressor", "indexer.compressor")
                for name in ("wkv.weight", "ape")
            ),
            *(
                f"{at}.{name}.weight"
                for at in ("compressor", "indexer.compressor")
                for name in ("wgate", "norm")
            ),
        )
    },
    "attn.indexer.wq_b.weight": "self_attention.indexer.linear_wq_b.weight",
    "attn.indexer.weights_proj.weight": "self_attention.indexer.linear_weights_proj.weight",
    "ffn.gate.weight": "mlp.router.weight",
    "ffn.gate.bias": "mlp.router.expert_bias",
    "ffn.gate.tid2eid": "mlp.router.tid2eid",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.linear_fc2.weight",
}


def _layers(names: Mapping[str, str], wanted: str) -> dict[Side | str, Side | str]:
    return {f"layers.{{i}}.{stored}": f"{wanted}.layers.{{i}}.{name}" for stored, name in names.items()}


HF_FROM_NATIVE = TensorMap.declare(
    {
        **_HF_TOP,
        **_layers(_HF_LAYER, "model"),
        stack(
            concat(f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"), over="e"
        ): "model.layers.{i}.mlp.experts.gate_up_proj",
        stack(f"{_EXPERT}.w2.weight", over="e"): "model.layers.{i}.mlp.experts.down_proj",
    }
)
NATIVE_FROM_HF = HF_FROM_NATIVE.inverse()

MEGATRON_FROM_NATIVE = TensorMap.declare(
    {
        **{stored: _MEGATRON + wanted for stored, wanted in _MEGATRON_TOP.items()},
        **_layers(_MEGATRON_LAYER, f"{_MEGATRON}decoder"),
        concat(f"{_SHARED}.w1.weight", f"{_SHARED}.w3.weight"): (
            f"{_MEGATRON}decoder.layers.{{i}}.mlp.shared_experts.linear_fc1.weight"
        ),
        concat(f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"): (
            f"{_MEGATRON}decoder.layers.{{i}}.mlp.experts.linear_fc1.weight{{e}}"
        ),
        f"{_EXPERT}.w2.weight": f"{_MEGATRON}decoder.layers.{{i}}.mlp.experts.linear_fc2.weight{{e}}",
    }
)
NATIVE_FROM_MEGATRON = MEGATRON_FROM_NATIVE.inverse()

HF_FROM_MEGATRON = NATIVE_FROM_MEGATRON.then(HF_FROM_NATIVE)
MEGATRON_FROM_HF = NATIVE_FROM_HF.then(MEGATRON_FROM_NATIVE)
