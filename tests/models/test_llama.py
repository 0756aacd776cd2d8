"""Our Llama against the one of transformers."""

from __future__ import annotations

import pytest
import torch

from batchscape.config import Llama
from batchscape.models.llama import LlamaModel

transformers = pytest.importorskip("transformers")

NAMES = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.projection": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "expand": "mlp.up_proj",
    "contract": "mlp.down_proj",
}


def translated(name):
    path = name.removesuffix(".weight")
    if path.startswith("blocks."):
        _, layer, inner = path.split(".", 2)
        return f"model.layers.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[path]}.weight"


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_logits_are_those_of_transformers(n_kv_heads):
    config = Llama(
        name="llama",
        n_layers=2,
        n_heads=4,
        n_kv_heads=n_kv_heads,
        d_model=32,
        d_ff=48,
        rope_base=500.0,
    )
    torch.manual_seed(0)
    model = LlamaModel(config, 50, 24).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    plain = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    other = transformers.LlamaForCausalLM(plain).double().eval()
    other.load_state_dict({translated(n): w for n, w in model.state_dict().items()})
    # Theirs normalises in float32 whatever the parameters are; the formula is the same.
    for name, module in list(other.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            exact = torch.nn.RMSNorm(32, eps=1e-5).double()
            exact.weight = module.weight
            other.set_submodule(name, exact)
    tokens = torch.randint(50, (3, 24))
    ours, theirs = model(tokens), other(input_ids=tokens, use_cache=False).logits
    # What is left is their rotation, whose angles are products in float32.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in other.parameters())


def test_tinyllama_has_its_published_size():
    """Zhang et al. 2024 (arXiv 2401.02385): 1.1 billion; the released weights: exactly these."""
    config = Llama(name="llama", n_layers=22, n_heads=32, n_kv_heads=4, d_model=2048, d_ff=5632)
    with torch.device("meta"):
        assert sum(p.numel() for p in LlamaModel(config, 32000, 2048).parameters()) == 1_100_048_384
