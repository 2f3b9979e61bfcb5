"""A DeepSeek-V4 of about 1.5 million parameters that has every kind of tensor of the real one.

Three layers: sliding, compressed-sparse and heavily-compressed attention; hash-routed and top-k
experts; hyper-connections; the int64 routing table; BF16 weights beside tensors that stay FP32.
Apart from the trainer because engines build it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from ckptstore.demo.config import LAYERS, DemoConfig
from ckptstore.demo.experts import ExpertRanks, ParallelExperts
from ckptstore.demo.fp8 import dequantise, quantise
from ckptstore.demo.task import ANSWER_LENGTH, END, PAD, PROMPT_LENGTH, VOCABULARY

EXPERTS = ".mlp.experts."  # part of the name of every tensor that is sliced over ranks
HEADS, HEAD_WIDTH, OUTPUT_RANK = 4, 32, 32

QUANTISED = (  # what the real model ships as FP8; its compressors, gates and embeddings stay BF16
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_proj",
    "self_attn.o_a_proj",
    "self_attn.o_b_proj",
    "indexer.q_b_proj",
    "shared_experts.",
    "mlp.experts.",
)


def v4_config(config: DemoConfig) -> DeepseekV4Config:
    """Give transformers' configuration; sequences are shorter than 10 tokens, so all windows are small."""
    small = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=config.hidden,
        moe_intermediate_size=config.expert_width,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        head_dim=HEAD_WIDTH,
        q_lora_rank=config.query_rank,
        num_experts_per_tok=config.experts_per_token,
        n_routed_experts=config.experts,
        max_position_embeddings=PROMPT_LENGTH + ANSWER_LENGTH,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        sliding_window=8,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        o_groups=2,
        o_lora_rank=OUTPUT_RANK,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=2,
        initializer_range=0.05,
        use_cache=False,  # recomputing 8 tokens costs less than keeping a cache of three kinds
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    small._attn_implementation = "eager"
    return small


def build_model(config: DemoConfig, ranks: ExpertRanks) -> nn.Module:
    """Build the model with the experts of `ranks.local`; equal global weights for any number of ranks.

    The process's own random state is neither used nor changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # Not .to(bfloat16) afterwards: that would cast the FP32-kept tensors and buffers too.
        make: Any = DeepseekV4ForCausalLM._from_config
        model = make(v4_config(config), dtype=torch.bfloat16)
    source = torch.Generator().manual_seed(config.seed)
    for layer in model.model.layers:
        mlp = layer.mlp
        if hasattr(mlp.gate, "tid2eid"):
            # Zero after construction ("real values come from the checkpoint"): all tokens to expert 0, twice.
            draws = torch.rand((VOCABULARY, config.experts), generator=source)
            mlp.gate.tid2eid.copy_(draws.argsort(dim=-1)[:, : config.experts_per_token])
        whole = mlp.experts
        mlp.experts = ParallelExperts(whole.gate_up_proj, whole.down_proj, limit=whole.limit, ranks=ranks)
    model.eval()
    built: nn.Module = model
    return built


def is_sharded(name: str) -> bool:
    """Tell whether a tensor of the model is a slice over ranks (of dimension 0) and not a replica."""
    return EXPERTS in name


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Tell whether engines get this tensor as FP8."""
    return tensor.dtype == torch.bfloat16 and tensor.ndim >= 2 and any(part in name for part in QUANTISED)


def logits(model: nn.Module, tokens: Tensor, last: int) -> Tensor:
    """Give FP32 logits of the last positions: int64 [B, S] -> [B, last, vocabulary]. Collective."""
    output: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=last).logits
    return output.float()


def answer_log_probs(model: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """Give the log-probability of each answer token: [B, P], [B, T] -> FP32 [B, T]. Collective."""
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    predicted = logits(model, tokens, answers.shape[1]).log_softmax(dim=-1)
    return predicted.gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def publication(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Give what engines get of this model: `quantised` and `scales` by name, and the `rest` as it is.

    The rest shares the model's memory. Slices of experts give the slices of the whole's bytes.
    """
    parts: dict[str, dict[str, Tensor]] = {"quantised": {}, "scales": {}, "rest": {}}
    for name, tensor in model.state_dict().items():
        if is_quantised(name, tensor):
            parts["quantised"][name], parts["scales"][name] = quantise(tensor)
        else:
            parts["rest"][name] = tensor
    return parts


@torch.no_grad()
def install(model: nn.Module, parts: dict[str, dict[str, Tensor]]) -> None:
    """Write a publication into a model that holds all experts, in place."""
    for name, tensor in model.state_dict().items():
        if name in parts["quantised"]:
            tensor.copy_(dequantise(parts["quantised"][name], parts["scales"][name], tensor.dtype))
        else:
            tensor.copy_(parts["rest"][name])
