"""Families of models whose heads for whole texts differ in names and layers."""

from __future__ import annotations

from support.training import GPT2, LLAMA
from support.weight_digests import BERT

WIDE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
WIDE |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
ENCODER = {name: value for name, value in BERT.items() if name != "model_type"}
FAMILIES = {
    "bert": BERT,
    "roberta": {**ENCODER, "model_type": "roberta"},
    "deberta-v2": {**ENCODER, "model_type": "deberta-v2"},
    "electra": {**ENCODER, "model_type": "electra"},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 4},
    "mpnet": {**ENCODER, "model_type": "mpnet"},
    "xlnet": {"d_model": 32, "d_inner": 64, "n_layer": 1, "n_head": 4},
    "xlm": {"emb_dim": 32, "n_layers": 1, "n_heads": 4},
    "funnel": {"d_model": 32, "d_inner": 64, "n_head": 4, "d_head": 8, "block_sizes": [1, 1]},
    "bart": WIDE,
    "gpt2": GPT2,
    "llama": LLAMA,
}
